"""Metrics from end to end: a real Ray that exports them, and the dashboard that shows them."""

import collections
import dataclasses
import functools
import json
import re
import secrets
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from rayloader import metrics
from tests.census import Process

DASHBOARD = Path(__file__).resolve().parents[2] / "examples" / "grafana" / "rayloader.json"
FILES, SIZE = 120, 3000
OTHER = "another run"
slow = pytest.mark.slow
pytestmark = pytest.mark.timeout(180)
HEAD = """
import sys
from ray.scripts.scripts import main
sys.argv = ["ray", "start", "--head", "--block", "--port=0", "--node-ip-address=127.0.0.1",
            "--include-dashboard=false", "--dashboard-agent-listen-port=0", "--num-cpus=1",
            "--metrics-export-port=0", "--disable-usage-stats", "--temp-dir=" + sys.argv[1]]
main()
"""
DRIVER = """
import json, os, signal, sys, time, urllib.request
import rayloader
from rayloader.launch import Launch

def said(report):
    return [one for rank in report.ranks for one in rank.receipts]

def exported(metric):
    import ray
    url = f"http://127.0.0.1:{ray.nodes()[0]['MetricsExportPort']}/metrics"
    try:
        lines = urllib.request.urlopen(url, timeout=10).read().decode().splitlines()
    except OSError:                             # Ray's agent comes up later
        return 0.0
    return sum(float(line.split()[-1]) for line in lines if line.startswith(metric + "{"))

source, address = sys.argv[1:]
receipts = []
fleet = rayloader.Fleet(source, ranks=2, batch_size=4, on_error="skip", ray=address, progress=False)
with fleet:
    os.remove(os.path.join(source, "000.bin"))
    receipts += said(fleet.run_epoch())
    while exported("ray_rayloader_files_total") < sum(one["files"] for one in receipts):
        time.sleep(0.2)
    time.sleep(2)                               # the rest of the same report is exported
    os.kill(receipts[1]["reader_pid"], signal.SIGKILL)
    receipts += said(fleet.run_epoch())
    other = rayloader.RankDataset(
        [os.path.join(source, name) for name in ("001.bin", "000.bin")], ray=address,
        shuffle=False, launch=Launch(0, 1, 0, 1, "another run", "test"),
    )
    with other:
        try:
            list(other)
        except rayloader.errors.ObjectNotFound:
            pass
        import ray
        port = ray.nodes()[0]["MetricsExportPort"]
        print(json.dumps({"port": port, "ranks": receipts, "other": other.receipt.asdict()}),
              flush=True)
        sys.stdin.readline()
"""


def start_head(census, directory, **environ):
    """A Ray of the test's own; its address. It ends with the census."""
    head = Process([sys.executable, "-c", HEAD, directory], census.environ(**environ))
    census._started.append(head)
    said, deadline = "", time.monotonic() + 40
    while "Ray runtime started" not in said and time.monotonic() < deadline:
        said = head.line(40)
    return Path(directory, "ray_current_cluster").read_text().strip()


def scraped(port):
    """Prometheus' text as Ray exports it: (metric, its type), and (name, labels, value)."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    kinds = dict(line.split()[2:4] for line in lines if line.startswith("# TYPE ray_rayloader_"))
    found = []
    for line in lines:
        if line.startswith("ray_rayloader_"):
            name, labels, value = re.fullmatch(r"(\w+)\{(.*)\} (\S+)", line).groups()
            found.append((name, dict(re.findall(r'(\w+)="([^"]*)"', labels)), float(value)))
    return kinds, found


def totals(found):
    """(metric without ``ray_``, run, rank[, le]) → the sum over all readers."""
    sums = collections.Counter()
    for name, labels, value in found:
        key = (name.removeprefix("ray_"), labels["run"], labels["rank"])
        sums[(*key, labels["le"]) if "le" in labels else key] += value
    return sums


def queried():
    """Every expression of the dashboard."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


@dataclasses.dataclass(frozen=True)
class Published:
    """What two runs under one Ray have published, and their receipts.

    Attributes:
        kinds: metric → its type.
        found: (name, labels, value) of every line.
        receipts: of both epochs of the Fleet's two ranks.
        other: the receipt of another run, which failed.
    """

    kinds: dict[str, str]
    found: list[tuple[str, dict[str, str], float]]
    receipts: list[dict[str, Any]]
    other: dict[str, Any]

    @functools.cached_property
    def sums(self):
        return totals(self.found)

    @functools.cached_property
    def run(self):
        """The name of the Fleet's run."""
        (run,) = {key[1] for key in self.sums} - {OTHER}
        return run

    def by_rank(self, name):
        """What was published under a name for each rank of the Fleet."""
        return [self.sums[f"rayloader_{name}", self.run, rank] for rank in ("0", "1")]

    def received(self, field):
        """What the receipts of each rank say, in sum."""
        return [sum(one[field] for one in self.receipts if one["rank"] == rank) for rank in (0, 1)]


@pytest.fixture(scope="module")
def published(module_census, tmp_path_factory):
    """A Fleet of two ranks, of which one lost its reader, and a run that failed."""
    source, census = tmp_path_factory.mktemp("data"), module_census
    for number in range(FILES):
        (source / f"{number:03}.bin").write_bytes(bytes(SIZE))
    secret = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    fast = {"RAY_metrics_report_interval_ms": "1000"}
    address = start_head(census, census.tmp + "/r", **secret, **fast)
    driver = census.start(DRIVER, str(source), address, **secret)
    line = ""
    while not line.startswith("{"):  # Ray has its own words for the reader that was killed
        line = driver.line(60)
    told = json.loads(line)
    deadline = time.monotonic() + 20
    while True:
        all_ = Published(*scraped(told["port"]), told["ranks"], told["other"])
        if all_.sums["rayloader_errors_total", OTHER, "0"]:
            break
        assert time.monotonic() < deadline, sorted(all_.sums)
        time.sleep(0.5)
    driver.tell()
    status, text = driver.wait()
    assert (status, "Traceback" in text) == (0, False), text
    return all_


@slow
def test_what_the_trainer_counts_is_what_its_receipts_say(published):
    for name, field in (("files_total", "files"), ("delivered_bytes_total", "bytes"),
                        ("batches_total", "steps")):  # fmt: skip
        assert published.by_rank(name) == published.received(field)
    stalls = published.by_rank("stall_seconds_total")
    assert stalls == pytest.approx(published.received("stall_seconds"))
    assert published.by_rank("restarts_total") == [0, 1]
    skips = sum(len(one["skipped"]) for one in published.receipts)
    assert sum(published.by_rank("skipped_files_total")) == skips == 2


@slow
def test_what_readers_count_is_what_the_receipts_say(published):
    """What the reader that was killed had counted since it was last asked has gone with it."""
    for name, field in (
        ("read_bytes_total", "bytes_transferred"), ("reads_total", "reads"),
        ("metadata_operations_total", "metadata_ops"), ("retries_total", "retries"),
    ):  # fmt: skip
        assert published.by_rank(name) == published.received(field)


@slow
def test_every_reader_tells_its_ceiling(published):
    readers = collections.defaultdict(set)
    for name, labels, _ in published.found:
        if name == "ray_rayloader_concurrency" and labels["run"] == published.run:
            readers[labels["rank"]].add(labels["WorkerId"])
    assert published.by_rank("concurrency") == [64 * len(readers[rank]) for rank in ("0", "1")]


@slow
def test_latencies_are_buckets_of_all_reads(published):
    for rank, reads in enumerate(published.received("reads")):
        latencies = {
            float(key[3]): count
            for key, count in published.sums.items()
            if key[:3] == (metrics.LATENCY, published.run, str(rank))
        }
        assert latencies[float("inf")] == reads
        assert sorted(latencies.values()) == [latencies[edge] for edge in sorted(latencies)]


@slow
def test_series_are_told_apart_by_run_and_storage(published):
    assert re.fullmatch(r"job [0-9a-f]+", published.run)
    assert published.sums["rayloader_errors_total", OTHER, "0"] == 1
    assert published.sums["rayloader_files_total", OTHER, "0"] == published.other["files"] == 1
    assert {labels["storage"] for _, labels, _ in published.found} == {"file"}


@slow
def test_all_that_the_dashboard_asks_for_is_published_and_nothing_else(published):
    asked = set(re.findall(r"ray_rayloader_\w+", " ".join(queried())))
    assert asked == {name for name, _, _ in published.found}
    assert published.kinds == {
        **{f"ray_{name}": "counter" for name in (*metrics.COUNTERS, metrics.LATENCY)},
        **{f"ray_{name}": "gauge" for name in metrics.GAUGES},
    }


def test_the_dashboard_asks_for_every_metric_and_selects_by_run_and_rank():
    asked = set(re.findall(r"ray_(rayloader_\w+)\{(.*?)\}", " ".join(queried())))
    assert {name for name, _ in asked} == {*metrics.COUNTERS, *metrics.GAUGES, metrics.LATENCY}
    assert {labels for _, labels in asked} == {'run=~"$run",rank=~"$rank"'}
    board = json.loads(DASHBOARD.read_text())
    assert [one["name"] for one in board["templating"]["list"]] == ["datasource", "run", "rank"]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian: prometheus)")
def test_the_dashboards_expressions_are_promql(tmp_path):
    rules = tmp_path / "rules.json"  # which is YAML too
    plain = [
        expr.replace("$__rate_interval", "1m").replace("$__range", "30m") for expr in queried()
    ]
    named = [{"record": f"number_{i}", "expr": expr} for i, expr in enumerate(plain)]
    rules.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": named}]}))
    ran = subprocess.run(["promtool", "check", "rules", rules], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
