"""What the doctor says of a machine and of files, each with its cure."""

import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
import threading

import pytest

from rayloader.experiment import doctor
from rayloader.experiment.doctor import Wanted
from rayloader.fleet.doctor import Examiner, Seen, _alike, _same_files, _token_file
from rayloader.storage.access import Access

WANTED = Wanted(ranks=1, concurrency=64, memory_bytes=64 << 20)
SECRET = "hunter2"
LIMITED = """
import json, resource
from rayloader.experiment import doctor
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
wanted = doctor.Wanted(ranks=1, concurrency=64, memory_bytes=64 << 20)
print(json.dumps([it.asdict() for it in doctor.machine(wanted)]))
"""


def by_name(findings):
    findings = list(findings)
    assert all(it.cure for it in findings if it.state in ("warning", "bad"))
    return {it.check: it for it in findings}


@pytest.fixture
def data(tmp_path):
    directory = tmp_path / "data"
    directory.mkdir()
    for number in range(5):
        (directory / f"{number}").write_bytes(os.urandom(20_000))
    return directory


def looked_at(directory, out=None):
    return by_name(doctor.files(doctor.sample_of(str(directory), Access()), out))


def test_this_machine_can_run_its_tests():
    found = by_name(doctor.machine(WANTED))
    assert {name for name, it in found.items() if it.state == "bad"} == set()
    assert "ray 2" in found["versions"].says


def test_a_limit_that_is_too_low_is_bad_and_has_a_cure():
    ran = subprocess.run(
        [sys.executable, "-c", LIMITED], capture_output=True, text=True, check=True
    )
    found = {it["check"]: it for it in json.loads(ran.stdout)}
    assert found["open files"] == {
        "check": "open files",
        "state": "bad",
        "says": "a process may open 100 files (ulimit -n), a reader needs 264",
        "cure": "ulimit -n 264",
    }
    assert found["address space"]["state"] == "bad"
    assert "(ulimit -v)" in found["address space"]["says"]


def test_more_memory_than_there_is_is_bad():
    found = by_name(doctor.machine(dataclasses.replace(WANTED, memory_bytes=1 << 45)))
    assert found["memory"].state == "bad"
    assert "memory_bytes of at most" in found["memory"].cure


def test_of_proxies_the_names_are_said_and_no_password(monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", f"http://user:{SECRET}@proxy:3128")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    finding = by_name(doctor.machine(WANTED))["proxies"]
    assert finding.state == "warning"
    assert "https_proxy" in finding.says
    assert SECRET not in str(finding)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    assert by_name(doctor.machine(WANTED))["proxies"].state == "ok"


def test_files_that_are_well(data):
    found = looked_at(data)
    assert {name for name, it in found.items() if it.state == "bad"} == set()
    assert found["files"].says == "5 looked at, all can be read"
    assert "opening and reading a page takes" in found["latency"].says
    assert found["on disk"].state == "ok"


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (os.mkfifo, "it is no regular file"),
        (lambda path: os.symlink("nowhere", path), "No such file or directory"),
    ],
    ids=["fifo", "dangling link"],
)
def test_what_is_no_file_is_told_and_not_waited_for(data, make, why):
    make(data / "odd")
    (finding,) = looked_at(data).values()
    assert finding.state == "bad"
    assert finding.says == f"1 of 6 cannot be read: {data / 'odd'}: {why}"


def test_sparse_files_are_told(data):
    for path in data.iterdir():
        path.unlink()
    with (data / "hole").open("wb") as file:
        file.truncate(10 << 20)
    found = looked_at(data)
    assert found["on disk"].state == "warning"
    assert "0% of their size: sparse or compressed" in found["on disk"].says


def test_results_beside_the_data_are_told(data, tmp_path):
    assert looked_at(data, str(tmp_path / "new" / "out"))["results"].state == "warning"
    if os.stat("/dev/shm").st_dev != os.stat(data).st_dev:
        assert looked_at(data, "/dev/shm/out")["results"].state == "ok"


@pytest.mark.parametrize(
    ("source", "words", "cure"),
    [
        ("nowhere", "CatalogError: ", "check the path; quote a glob"),
        ("empty", "holds nothing to read", "another source"),
    ],
)
def test_a_source_that_cannot_be_listed_is_bad(tmp_path, source, words, cure):
    (tmp_path / "empty").mkdir()
    sample, finding = doctor.listed(str(tmp_path / source), Access())
    assert sample is None
    assert (finding.state, words in finding.says, finding.cure) == ("bad", True, cure)


def test_an_endpoint_where_nothing_listens_is_bad():
    (finding,) = doctor.endpoint(Access(endpoint="http://127.0.0.1:1"))
    assert (finding.state, finding.says) == ("bad", "nothing listens at 127.0.0.1:1")


def test_a_password_in_an_endpoint_is_not_said(tmp_path):
    access = Access(endpoint=f"http://u:{SECRET}@127.0.0.1:1/a@b")
    assert access.destination == "http://127.0.0.1:1/a@b"
    assert SECRET not in str(doctor.endpoint(access))


@pytest.mark.parametrize("wrong", ["127.0.0.1:9000", "http://h:99999", "ftp://h", "http://"])
def test_an_endpoint_that_is_no_address_is_bad(wrong):
    (finding,) = doctor.endpoint(Access(endpoint=wrong))
    assert (finding.check, finding.state) == ("endpoint", "bad")
    assert finding.cure


@pytest.fixture
def server(monkeypatch):
    """Where something listens that says nothing; and environment that says nothing of proxies."""
    for name in ("http_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=closing, args=(listener,), daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)


def closing(listener):
    """Accept and close, until the listener is shut down."""
    with contextlib.suppress(OSError):
        while True:
            listener.accept()[0].close()


KEYS = {"AWS_ACCESS_KEY_ID": SECRET, "AWS_SECRET_ACCESS_KEY": SECRET}


def test_an_endpoint_behind_a_proxy_is_told(server, monkeypatch):
    access = Access(endpoint=f"http://{server}", secrets=KEYS)
    assert "endpoint's proxy" not in by_name(doctor.endpoint(access))
    monkeypatch.setenv("http_proxy", f"http://u:{SECRET}@p:1")
    finding = by_name(doctor.endpoint(access))["endpoint's proxy"]
    assert finding.cure.startswith("NO_PROXY=127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert "endpoint's proxy" not in by_name(doctor.endpoint(access))


def test_an_endpoint_that_names_the_bucket_is_bad(server):
    port = server.rpartition(":")[2]
    access = Access(endpoint=f"http://data.localhost:{port}", secrets=KEYS)
    found = by_name(doctor._bucket(access, "data.localhost", "data"))
    assert found["path style"].state == "bad"
    assert found["path style"].cure == "the endpoint without it: localhost"
    found = by_name(doctor.endpoint(Access(endpoint=f"http://{server}", secrets=KEYS), "data"))
    assert found["path style"].says == f"requests are for http://{server}/data/key"
    assert found["TLS"].says.startswith("not used")


def test_nodes_must_have_versions_clocks_and_files_in_common(data):
    sample = os.fsencode(data), [b"0", b"1"]
    here = Examiner().look(WANTED, sample)
    assert {it.state for it in _alike(here, here, 0.01, 0.1)} == {"ok"}
    there = {**here, "versions": {**here["versions"], "ray": "1.0"},
             "files": [Seen(), here["files"][1]._replace(size=1)]}  # fmt: skip
    found = by_name(_alike(here, there, 5.0, 0.1))
    assert found["same versions"].says.startswith("ray 1.0 there, ")
    assert found["clock"].says == "its clock is +5.0 s from this one"
    assert found["same files"].says == "of 2 files 1 are not there, and 1 differ"


def test_a_reader_must_see_the_same_files_as_its_rank(data):
    here = Examiner().look(WANTED, (os.fsencode(data), [b"0", b"1"]))["files"]
    assert _same_files(here, here).state == "ok"
    mounted_twice = [one._replace(device=one.device + 1) for one in here]
    assert _same_files(here, mounted_twice).state == "warning"
    copies = [here[0], here[1]._replace(inode=1)]
    assert _same_files(here, copies).says == (
        "of 2 files 0 are not there for a reader on this node, and 1 are others"
    )
    assert _same_files([here[0], Seen()], [here[0], Seen()]).state == "ok", "nowhere to be seen"
    (finding,) = by_name([_same_files(here, [here[0], Seen()])]).values()
    assert finding.state == "bad"
    assert "1 are not there for a reader on this node, and 0 are others" in finding.says


def test_a_token_that_others_can_read_is_told(tmp_path):
    path = tmp_path / "token"
    path.write_text(SECRET)
    environ = {"RAY_AUTH_TOKEN_PATH": str(path)}
    path.chmod(0o644)
    (finding,) = by_name(_token_file(environ)).values()
    assert finding.state == "warning"
    assert finding.cure == f"chmod 600 {path}"
    assert SECRET not in str(finding)
    path.chmod(0o600)
    assert not list(_token_file(environ))
    path.unlink()
    assert not list(_token_file(environ))


V1 = {"blkio.throttle.read_bps_device": "8:16 1048576\n", "blkio.throttle.read_iops_device": "\n"}
V2 = {"io.max": "8:16 rbps=1048576 wbps=max riops=max wiops=9\n8:0 rbps=max wbps=5\n"}


@pytest.mark.parametrize(("version", "files"), [(1, V1), (2, V2)])
def test_a_control_group_that_limits_reading_is_told(tmp_path, version, files):
    """Of the group itself or of one above it; limits of writing are none."""
    membership = tmp_path / "membership"
    membership.write_text({1: "3:blkio:/job/step\n", 2: "0::/job/step\n"}[version])
    mount = tmp_path / "mount"
    group = mount / ("blkio/job" if version == 1 else "job")
    group.mkdir(parents=True)
    (finding,) = doctor.io_limit(str(mount), str(membership))
    assert finding.state == "ok"
    for name, text in files.items():
        (group / name).write_text(text)
    (finding,) = by_name(doctor.io_limit(str(mount), str(membership))).values()
    assert finding.state == "warning"
    assert finding.says == ("the control group limits reading from device 8:16 to 1048576 bytes/s")


@pytest.mark.timeout(90)
def test_the_command_looks_at_everything_and_tells_no_secret(data):
    environ = {**os.environ, "AWS_ACCESS_KEY_ID": SECRET, "AWS_SECRET_ACCESS_KEY": SECRET,
               "HTTP_PROXY": f"http://u:{SECRET}@p:1", "NO_PROXY": "*"}  # fmt: skip
    ran = subprocess.run(
        [sys.executable, "-m", "rayloader.cli", "doctor", str(data), "--json"],
        capture_output=True, text=True, timeout=80, env=environ,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert SECRET not in ran.stdout + ran.stderr
    found = json.loads(ran.stdout)
    assert list(found) == ["this machine", "source", "Ray", "a reader here", "a trial"]
    assert found["a reader here"][-1] == {
        "check": "same files",
        "state": "ok",
        "says": "a reader sees the same ones (device and inode)",
        "cure": "",
    }
    (trial,) = found["a trial"]
    assert "a rank read 5 entries" in trial["says"]
    assert "limit: " in trial["says"]
    assert trial["cure"]


def test_the_command_fails_where_something_would_not_work(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-m", "rayloader.cli", "doctor", str(tmp_path / "nowhere"),
         "--ray", "127.0.0.1:1"],
        capture_output=True, text=True, timeout=50,
    )  # fmt: skip
    assert ran.returncode == 1
    assert "bad      source: " in ran.stdout
    assert "bad      Ray: no Ray answers at 127.0.0.1:1" in ran.stdout
    assert "→ ray start" in ran.stdout
    assert ran.stdout.splitlines()[-1].startswith("not ready: mend what is bad (")
    assert "2 bad" in ran.stdout.splitlines()[-1]
