"""The storage in memory does what a test or a what-if asks of it: latency, bandwidth, faults."""

import errno
import math
import pickle
import time

import numpy as np
import pytest

from rayloader.errors import AccessDenied, OptionError, StorageError
from rayloader.storage import DROP, Keys, StorageSpec, open_storage
from rayloader.storage.memory import Fault, MemoryLister, MemorySpec
from rayloader.testing import Reading, packed


@pytest.fixture
def opened():
    """``opened(objects, **spec)``: a Reading; the objects are ``m/0`` … ."""
    storages = []

    def open_one(sizes, **spec):
        objects = {b"m/%d" % i: bytes(size) for i, size in enumerate(sizes)}
        storages.append(open_storage(MemorySpec(objects=objects, **spec)))
        return Reading(storages[-1])

    yield open_one
    for storage in storages:
        storage.close()


def keys(n):
    return [b"%d" % i for i in range(n)]


def fetch(reading, n):
    """Seconds that fetching all n objects takes [s], and what came of it."""
    group, progress = reading.measured(b"m", keys(n))
    places = np.cumsum(progress.sizes) - progress.sizes
    began = time.perf_counter()
    reading.storage.fetch(group, places)
    fetched = reading.wait(group)
    return time.perf_counter() - began, fetched


@pytest.mark.parametrize("concurrency", [1, 8, 64])
def test_a_fetch_takes_latency_times_reads_by_concurrency(opened, concurrency):
    reads = 20 * concurrency
    reading = opened([10] * reads, latency=0.005, concurrency=concurrency)
    seconds, _ = min(fetch(reading, reads) for _ in range(3))
    assert 0.1 <= seconds < 0.2
    count = reading.storage.counters()
    assert count.peak_in_flight == concurrency
    assert count.read_seconds == pytest.approx(3 * reads * 0.005, rel=0.01)


def test_bandwidth_is_shared_by_all_reads(opened):
    reading = opened([100_000] * 10, bandwidth=10e6, concurrency=64)
    seconds, _ = fetch(reading, 10)
    assert 0.1 <= seconds < 0.2


def test_measuring_has_a_latency_of_its_own(opened):
    reading = opened([1] * 4, measure_latency=0.05, concurrency=2)
    began = time.perf_counter()
    reading.measured(b"m", keys(4))
    assert 0.1 <= time.perf_counter() - began < 0.2


@pytest.mark.parametrize("on", ["measure", "read"])
def test_a_fault_happens_as_often_as_it_says(opened, on):
    faults = {b"m/1": Fault(on=on, errno=errno.EACCES, times=1)}
    reading = opened([10, 10], faults=faults)
    group, progress = reading.measured(b"m", keys(2))
    reading.storage.fetch(group, packed(progress.sizes))
    fetched = reading.wait(group)
    failures = (progress if on == "measure" else fetched).failures
    assert {i: type(error) for i, error in failures.items()} == {1: AccessDenied}
    assert fetched.sizes.tolist() == [10, -1]
    assert fetch(reading, 2)[1].failures == {}


def test_a_fault_without_an_end_happens_always(opened):
    reading = opened([10], faults={b"m/0": Fault(errno=errno.EIO)})
    for _ in range(3):
        assert type(fetch(reading, 1)[1].failures[0]) is StorageError


def test_an_object_may_be_slower_than_others(opened):
    reading = opened([10] * 8, faults={b"m/3": Fault(delay=0.05)})
    assert 0.05 <= fetch(reading, 8)[0] < 0.15


def test_a_read_that_never_returns_keeps_its_place_in_flight(opened):
    reading = opened([10] * 3, faults={b"m/0": Fault(delay=math.inf)}, concurrency=2)
    group, progress = reading.measured(b"m", keys(3))
    reading.storage.fetch(group, packed(progress.sizes))
    reading.until(lambda: reading.storage.counters().reads == 2)
    reading.storage.reset_peak()
    assert reading.storage.counters().peak_in_flight == 1
    assert reading.storage.oldest_read()[1] == "0"


def test_large_objects_are_read_in_parts(opened):
    reading = opened([50_000], part_bytes=8192, scratch_bytes=64 << 10, concurrency=16)
    fetch(reading, 1)
    assert reading.storage.counters().reads == 7
    group, _ = reading.measured(b"m", keys(1))
    reading.storage.fetch(group, np.array([DROP]))
    reading.wait(group)
    assert reading.storage.counters().reads == 7 + 13


def test_quick_storage_lets_its_owner_have_a_word(opened):
    reading = opened([10] * 2000, concurrency=64)
    group, _ = reading.measured(b"m", keys(2000))
    reading.storage.fetch(group, np.full(2000, DROP))
    reading.storage.discard(group)
    assert reading.storage.counters().reads < 2000


def test_the_recipe_travels():
    spec = MemorySpec(objects={b"a": b"aa"}, latency=0.1, faults={b"a": Fault(delay=math.inf)})
    assert pickle.loads(pickle.dumps(spec)) == spec


def test_objects_are_listed_below_their_root():
    lister = MemoryLister(MemorySpec(objects={b"r/a": b"1", b"r/d/b": b"22", b"ra": b"333"}))
    assert list(lister.list(b"r")) == [(b"a", 1), (b"d/b", 2)]
    assert len(list(lister.list(b""))) == 3


def test_the_scheme_without_objects_is_an_error():
    with pytest.raises(OptionError, match="MemorySpec"):
        open_storage(StorageSpec(scheme="memory"))
    with pytest.raises(OptionError, match="known: file, s3, az, memory"):
        open_storage(StorageSpec(scheme="nfs"))


def test_keys_are_one_blob():
    some = Keys.of([b"a", b"", b"ccc"])
    assert some.n == 3
    assert [some.key(i) for i in range(3)] == [b"a", b"", b"ccc"]
    assert Keys.of([]).n == 0
