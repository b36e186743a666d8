"""Cases built to have one limit each, and the report names it."""

import contextlib
import heapq
import os
import subprocess
import sys
import time

import pytest

import rayloader
from rayloader import cluster
from tests import slow_mount

BUSY = "while True: pass"
pytestmark = pytest.mark.slow

needs_slow_mount = pytest.mark.skipif(
    not slow_mount.available(), reason="needs root and /dev/fuse for a slow file system"
)


class NarrowMount(slow_mount.SlowMount):
    """Answers reads one after the other, at so many bytes per second."""

    bandwidth = 20e6
    _free_at = 0.0

    def _later(self, seconds, unique, data, error=0):
        if len(data) < 1000:  # an answer to an open
            super()._later(seconds, unique, data, error)
            return
        with self._changed:
            begin = max(self._free_at, time.monotonic() + seconds)
            self._free_at = begin + len(data) / self.bandwidth
            heapq.heappush(self._due, (self._free_at, next(self._order), unique, data, error))
            self._changed.notify()


@pytest.fixture
def storage(tmp_path, request):
    """A slow file system and the sources of files on it."""
    mount = getattr(request, "param", slow_mount.SlowMount)(os.fsencode(tmp_path))
    yield mount
    mount.close()


@pytest.fixture(scope="module")
def hot(tmp_path_factory):
    """Many small files in the page cache."""
    root = tmp_path_factory.mktemp("hot")
    for number in range(3000):
        (root / f"{number:04}").write_bytes(os.urandom(4096))
    return root


@pytest.fixture(scope="module", autouse=True)
def ended():
    yield
    cluster.shutdown()


def fill(mount, files, size):
    mount.files = {b"%04d" % number: os.urandom(size) for number in range(files)}
    return [os.path.join(mount.root, name) for name in mount.files]


def report_of(source, epochs=1, until=None, **how):
    """The last of some epochs; the first pays for memory that is touched for the first time.

    With ``until``, more of them, if need be, until this limit is named: whatever else runs here
    may have the CPUs for an epoch.
    """
    with rayloader.Fleet(source, progress=False, **{"batch_size": 4, **how}) as fleet:
        report = [fleet.run_epoch() for _ in range(epochs)][-1]
        for _ in range(10):
            if until in (None, report.limit.name):
                break
            report = fleet.run_epoch()
        return report


def require(report, name, *words):
    limit = report.limit
    assert limit.name == name, f"{limit}\n{report}\n{report.evidence}"
    for word in words:
        assert word in limit.because + limit.advice
    assert str(limit) in str(report)
    assert report.asdict()["limit"]["name"] == name


@needs_slow_mount
def test_storage_latency(storage):
    storage.latency = 0.02
    report = report_of(fill(storage, 300, 4096), 2, concurrency=8)
    require(report, "storage latency", "of 8 reads were in flight", "alone a read takes", "helps")
    assert report.latency_alone == pytest.approx(0.022, rel=0.5)


@needs_slow_mount
@pytest.mark.parametrize("storage", [NarrowMount], indirect=True)
def test_storage_bandwidth(storage):
    report = report_of(fill(storage, 300, 65536), 2, concurrency=16)
    require(report, "storage bandwidth", "queue")
    assert report.latency_p50 > 2 * report.latency_alone


@needs_slow_mount
def test_memory(storage):
    storage.latency = 0.02
    source = fill(storage, 150, 120_000)
    require(report_of(source, 2, memory_bytes=2 << 20), "memory bound", "memory_bytes=2 MiB")


@needs_slow_mount
def test_read_ahead(storage):
    storage.latency = 0.02
    report = report_of(fill(storage, 80, 4096), read_ahead_batches=1, batch_size=2)
    require(report, "read-ahead bound", "read_ahead_batches allows 2 samples")


def test_the_consumer(hot):
    report = report_of(hot, batch_size=100, compute_seconds=0.05)
    require(report, "consumer", "in the training step")


def test_client_cpu(hot):
    require(
        report_of(hot, 3, "client CPU", ranks=2, batch_size=50, touch=True),
        "client CPU",
        "of the CPUs",
    )


def test_other_programs(hot):
    """However little of the CPUs is left to the reader."""
    with contextlib.ExitStack() as stack:
        for _ in range(2 * os.cpu_count()):
            other = stack.enter_context(subprocess.Popen([sys.executable, "-c", BUSY]))
            stack.callback(other.kill)
        report = report_of(hot, 3, "client CPU", batch_size=50)
    require(report, "client CPU", "other programs")


def test_the_gil(hot):
    report = report_of(hot, 3, "GIL", engine="python", deliver=False, batch_size=100)
    require(report, "GIL", "Python engine")
