"""``ray up cluster.yaml`` on two hosts: what is installed, who is let in, and a Fleet on both.

The tests of this folder are steps of one story, in the order in which they stand.
"""

import json
import re
import time

import numpy as np
import pytest

from rayloader.catalog import Catalog
from rayloader.receipt import Fingerprint, name_hashes
from tests.cluster.conftest import (
    ENVIRONMENT,
    FILES,
    GONE_SECONDS,
    PYTHON,
    hosts_of_ray,
    ray,
    until_both_are_in,
)
from tests.hosts import ADDRESSES, HOME, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
HEAD = ADDRESSES["one"]
DRIVER = """
import json, sys, rayloader
def tell(**what):
    print(json.dumps(what), flush=True)
fleet = rayloader.Fleet(
    sys.argv[1], ranks=4, batch_size=4, compute_seconds=0.5, read_ahead_batches=1, ray="cluster",
    progress=False,
)
with fleet:
    tell(package=rayloader.__file__)
    while sys.stdin.readline().strip():
        running = fleet.start_epoch()
        tell(reading=True)
        report = running.report()
        tell(
            files=report.files, read_hash=report.read_hash, events=report.events,
            means=sorted({
                f"{one['engine']} {one['channel']}"
                for rank in report.ranks for one in rank.receipts
            }),
            hosts=[[part.hello.host for part in rank.parts] for rank in report.ranks],
            pids=[rank.pids for rank in report.ranks],
            readers=[rank.reader_pids for rank in report.ranks],
        )
"""


class Driver:
    """A Fleet of four ranks, led from the head."""

    def __init__(self, site, folder):
        self._process = site.one.start(PYTHON, DRIVER, str(folder))

    def heard(self, seconds=60):
        """Its next report; what others print in between is passed over."""
        while not (line := self._process.line(seconds)).startswith("{"):
            pass
        return json.loads(line)

    def begin(self):
        """Have it begin an epoch."""
        self._process.tell("go on")
        assert self.heard() == {"reading": True}

    def end(self):
        """Have it close the Fleet and end."""
        self._process.tell()
        status, said = self._process.wait(30)
        assert status == 0, said

    def close(self):
        self._process.close()


@pytest.fixture
def driver(cluster, shared):
    one = Driver(cluster, shared / "train")
    yield one
    one.close()


@pytest.fixture(scope="module")
def everything(shared):
    """The fingerprint of an epoch that reads each sample once."""
    hashes = name_hashes(*Catalog.from_source(shared / "train").blob_at(np.arange(FILES)))
    return f"{Fingerprint.of(hashes).content:016x}"


def test_one_command_starts_ray_on_both_hosts_with_what_the_file_sets(cluster):
    deadline = time.monotonic() + 60  # the autoscaler looks every few seconds
    while "2 local.cluster.node" not in (status := ray(cluster, "exec", "ray status")):
        assert time.monotonic() < deadline, status
        time.sleep(1)
    assert hosts_of_ray(cluster) == [f"{host.address} 1000000000" for host in cluster.hosts]
    for host in cluster.hosts:
        token = f"{HOME}/.ray/auth_token"
        assert host.run("stat", "-c", "%a", token).strip() == "600"
        limits = host.run("sh", "-c", "cat /proc/$(pgrep -x raylet)/limits").splitlines()
        (files,) = [line.split() for line in limits if line.startswith("Max open files")]
        assert files[3] == files[4]
        where = host.run(PYTHON, "-c", "import rayloader; print(rayloader.__file__)")
        assert where.startswith(f"{ENVIRONMENT}/lib/")


def test_who_has_no_token_is_refused_and_the_dashboard_is_on_the_head_only(cluster):
    cluster.two.run("mkdir", "-p", "/tmp/nobody")
    refused = cluster.two.run(
        "env", "HOME=/tmp/nobody", PYTHON, "-c", STRANGER, f"{HEAD}:6379", timeout=60
    )
    assert f"the Ray at {HEAD}:6379 asks for a token" in refused
    asked = [PYTHON, "-c", ASK]
    assert cluster.one.run(*asked, "127.0.0.1").split() == ["401", "200"]
    assert "refused" in cluster.two.run(*asked, HEAD)


STRANGER = """
import sys, rayloader
try:
    rayloader.Fleet(["/etc/hostname"], ray=sys.argv[1]).open()
except rayloader.ClusterUnreachable as refused:
    print(refused)
"""
ASK = """
import os, sys, urllib.error, urllib.request
token = open(os.path.expanduser("~/.ray/auth_token")).read()
for headers in ({}, {"Authorization": f"Bearer {token}"}):
    asked = urllib.request.Request(f"http://{sys.argv[1]}:8265/api/version", headers=headers)
    try:
        print(urllib.request.urlopen(asked, timeout=10).status)
    except urllib.error.HTTPError as answer:
        print(answer.code)
    except urllib.error.URLError as error:
        print(error.reason)
"""


def test_the_fleet_of_the_page_reads_on_both_hosts_as_it_stands(cluster, shared):
    page = (ROOT / "docs" / "cluster.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    assert "/data/train" in code
    script = cluster.desk.home / "fleet.py"
    script.write_text(code.replace("/data/train", str(shared / "train")))
    said = ray(cluster, "submit", f"{HOME}/fleet.py")
    hosts = [line.split()[1] for line in said.splitlines() if re.match(r" +\d+ (one|two) ", line)]
    assert hosts == ["one", "two", "one", "two"]
    assert re.search(rf"^ all +{FILES} ", said, re.M)


def test_a_fleet_reads_on_both_hosts_and_outlives_the_readers_of_one(cluster, driver, everything):
    assert driver.heard(120)["package"].startswith(f"{ENVIRONMENT}/lib/")
    driver.begin()
    report = driver.heard()
    assert (report["files"], report["read_hash"]) == (FILES, everything)
    assert report["hosts"] == [["one"], ["two"], ["one"], ["two"]]
    assert report["events"] == []
    assert report["means"] == ["native local"]

    driver.begin()
    time.sleep(1.5)
    lost = [str(pid) for rank in (1, 3) for pid in report["readers"][rank]]
    cluster.two.run("kill", "-9", *lost)
    after = driver.heard()
    assert (after["files"], after["read_hash"]) == (FILES, everything)
    assert after["pids"] == report["pids"]
    for rank in (1, 3):
        assert f"the reader of rank {rank} was started again once" in after["events"]
    driver.end()
    for host in cluster.hosts:
        assert [line for line in host.processes() if "ray::Consumer" in line] == []


def test_a_host_that_is_cut_off_is_done_without_and_taken_in_again(cluster, driver, everything):
    driver.heard(120)
    driver.begin()
    time.sleep(1.5)
    cluster.cut_off(cluster.two)
    report = driver.heard(120)
    assert (report["files"], report["read_hash"]) == (FILES, everything)
    assert report["hosts"] == [["one"], ["two", "one"], ["one"], ["two", "one"]]
    for rank in (1, 3):
        (event,) = [one for one in report["events"] if f"consumer of rank {rank} died" in one]
        assert "on two); process" in event
        assert "on one went on from step" in event
    driver.end()

    cluster.connect(cluster.two)
    until_both_are_in(cluster)


def test_ray_down_ends_ray_on_all_hosts(cluster):
    ray(cluster, "down", "--yes")
    deadline = time.monotonic() + GONE_SECONDS
    while left := [line for host in cluster.hosts for line in host.processes()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.5)
