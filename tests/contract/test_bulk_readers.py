"""All storages that need no network keep the contract."""

import dataclasses
import math
import os

import pytest
import slow_mount

from rayloader.storage import StorageSpec, open_storage
from rayloader.storage.memory import Fault, MemorySpec
from rayloader.testing import BulkReaderContract, Reading, SlowBulkReaderContract, packed


class DirectorySite:
    """Files in a directory."""

    any_name = True

    def __init__(self, directory, engine):
        self.root = os.fsencode(directory)
        self._engine = engine

    def _path(self, key):
        path = os.path.join(self.root, key)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return path

    def put(self, key, data):
        with open(os.open(self._path(key), os.O_WRONLY | os.O_CREAT, 0o644), "wb") as file:
            file.truncate(len(data))
            file.write(data)

    def replace(self, key, data):
        with open(self._path(key) + b".new", "wb") as file:
            file.write(data)
        os.rename(self._path(key) + b".new", self._path(key))

    def remove(self, key):
        os.remove(self._path(key))

    def open(self, **spec):
        return open_storage(StorageSpec(engine=self._engine, **spec))


class MountSite:
    """Files of a mounted file system that takes its time."""

    any_name = True

    def __init__(self, directory, engine):
        self.mount = slow_mount.SlowMount(os.fsencode(directory))
        self.root = self.mount.root
        self._engine = engine

    @property
    def latency(self):
        return self.mount.latency

    @latency.setter
    def latency(self, seconds):
        self.mount.latency = seconds

    def stick(self, key):
        self.mount.stuck.add(key)

    def unstick(self, key):
        self.mount.release(key)

    def put(self, key, data):
        self.mount.files[key] = data

    replace = put

    def remove(self, key):
        del self.mount.files[key]

    def open(self, **spec):
        return open_storage(StorageSpec(engine=self._engine, **spec))


class MemorySite:
    """Objects in memory; time is simulated."""

    root = b"memory"
    any_name = True

    def __init__(self):
        self._objects = {}
        self._faults = {}
        self._latency = 0.0
        self._storages = []

    @property
    def latency(self):
        return self._latency

    @latency.setter
    def latency(self, seconds):
        self._latency = seconds
        for storage in self._storages:
            storage.latency = seconds

    def stick(self, key):
        self._faults[b"memory/" + key] = Fault(delay=math.inf)

    def unstick(self, key):
        del self._faults[b"memory/" + key]
        for storage in self._storages:
            storage.unstick(b"memory/" + key)

    def put(self, key, data):
        self._objects[b"memory/" + key] = data

    replace = put

    def remove(self, key):
        del self._objects[b"memory/" + key]

    def open(self, **spec):
        recipe = MemorySpec(objects=self._objects, faults=self._faults, latency=self._latency)
        storage = open_storage(dataclasses.replace(recipe, **spec))
        self._storages.append(storage)
        return storage


class OnDirectory:
    engine: str

    @pytest.fixture
    def site(self, tmp_path):
        return DirectorySite(tmp_path, self.engine)


@pytest.mark.skipif(not slow_mount.available(), reason="needs root and /dev/fuse")
class OnMount:
    engine: str

    @pytest.fixture
    def site(self, tmp_path):
        site = MountSite(tmp_path, self.engine)
        yield site
        site.mount.close()


class InMemory:
    @pytest.fixture
    def site(self):
        return MemorySite()


class TestNative(OnDirectory, BulkReaderContract):
    engine = "native"


class TestPython(OnDirectory, BulkReaderContract):
    engine = "python"


class TestMemory(InMemory, BulkReaderContract):
    pass


class TestNativeOnSlowMount(OnMount, SlowBulkReaderContract):
    engine = "native"


class TestPythonOnSlowMount(OnMount, SlowBulkReaderContract):
    engine = "python"


class TestSlowMemory(InMemory, SlowBulkReaderContract):
    pass


@pytest.mark.parametrize("engine", ["native", "python"])
@pytest.mark.parametrize("concurrency", [64, 5])
@pytest.mark.skipif(not slow_mount.available(), reason="needs root and /dev/fuse")
def test_the_file_system_sees_as_many_reads_in_flight_as_are_allowed(tmp_path, engine, concurrency):
    site = MountSite(tmp_path, engine)
    storage = site.open(concurrency=concurrency)
    try:
        keys = [b"f%d" % i for i in range(200)]
        for key in keys:
            site.put(key, bytes(100))
        reading = Reading(storage)
        group, progress = reading.measured(site.root, keys)
        site.latency, site.mount.peak = 0.2 if concurrency == 64 else 0.02, 0
        storage.fetch(group, packed(progress.sizes))
        assert not reading.wait(group).failures
        assert site.mount.peak == storage.counters().peak_in_flight == concurrency
    finally:
        storage.close()
        site.mount.close()
