"""What files, directories and descriptors do that other objects do not; both engines."""

import errno
import fcntl
import itertools
import mmap
import os
import resource
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
import slow_mount

import rayloader.storage
from rayloader.config import DESCRIPTORS_KEPT
from rayloader.errors import (
    AccessDenied,
    DirectUnsupported,
    NotRegularFile,
    ObjectNotFound,
    OptionError,
    StorageError,
    Truncated,
)
from rayloader.storage import DROP, SKIP, Keys, StorageSpec, open_storage
from rayloader.storage._python import FileCode
from rayloader.storage.posix import cgroup_cpus, open_posix
from rayloader.testing import PATIENCE, Reading, content, packed

F_SETLEASE = 1024


@pytest.fixture(params=["native", "python"])
def opened(request):
    """``opened(**spec)``: a Reading through either engine."""
    readings = []

    def open_one(**spec):
        reading = Reading(open_posix(StorageSpec(engine=request.param, **spec)))
        readings.append(reading)
        return reading

    yield open_one
    for reading in readings:
        reading.storage.close()


@pytest.fixture
def root(tmp_path):
    """A directory with the file ``good``."""
    (tmp_path / "good").write_bytes(content("good", 5000))
    return os.fsencode(tmp_path)


@pytest.fixture
def mount(tmp_path):
    if not slow_mount.available():
        pytest.skip("needs root and /dev/fuse")
    (tmp_path / "mount").mkdir()
    mount = slow_mount.SlowMount(os.fsencode(tmp_path / "mount"))
    yield mount
    mount.close()


def failures(reading, root, keys):
    """The errors of measuring ``keys`` beside a good file, which must come out well."""
    group, progress = reading.measured(root, [*keys, b"good"])
    places = packed(progress.sizes)
    reading.storage.fetch(group, places)
    assert not reading.wait(group).failures
    assert reading.at(places[-1], 5000) == content("good", 5000)
    assert len(progress.failures) == len(keys)
    return [progress.failures[i] for i in range(len(keys))]


# Which engine


def test_both_engines_name_failures_alike():
    native = pytest.importorskip("rayloader.storage._native")
    for code in FileCode:
        assert getattr(native, f"FILE_{code.name}") == code


def without_extension(monkeypatch):
    monkeypatch.setitem(sys.modules, "rayloader.storage._native", None)
    monkeypatch.delattr(rayloader.storage, "_native", raising=False)


def test_asking_for_the_native_engine_without_it_says_how_to_get_it(monkeypatch):
    without_extension(monkeypatch)
    with pytest.raises(OptionError, match=r"C compiler.*engine='python'"):
        open_posix(StorageSpec(engine="native"))


def test_without_the_extension_python_serves_and_is_named(monkeypatch):
    without_extension(monkeypatch)
    storage = open_storage(StorageSpec())
    assert storage.engine == "python"
    storage.close()


# What is no file


def test_what_is_no_regular_file_is_named_and_opening_it_does_not_hang(root, opened):
    os.mkfifo(root + b"/fifo")
    os.mkdir(root + b"/directory")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(root + b"/socket")
        keys = [b"fifo", b"directory", b"socket", b"/dev/null"]
        errors = failures(opened(), root, keys)
    assert [type(error) for error in errors] == [NotRegularFile] * 4
    assert [error.key for error in errors] == ["fifo", "directory", "socket", "/dev/null"]


def test_a_directory_is_no_file_with_o_direct_either(root, opened):
    os.mkdir(root + b"/directory")
    (error,) = failures(opened(direct="fallback"), root, [b"directory"])
    assert type(error) is NotRegularFile


def test_names_that_lead_nowhere_are_errors_of_their_own(root, opened):
    os.symlink("nowhere", root + b"/dangling")
    os.symlink("loop", root + b"/loop")
    keys = [b"dangling", b"loop", b"n" * 300, b"n\0ul", b"", b"good/below", b"p/" * 3000]
    errors = failures(opened(), root, keys)
    assert [type(error) for error in errors] == [
        ObjectNotFound, StorageError, StorageError, StorageError,
        ObjectNotFound, ObjectNotFound, StorageError,
    ]  # fmt: skip
    assert [error.errno for error in errors[1:3]] == [errno.ELOOP, errno.ENAMETOOLONG]
    assert "NUL" in str(errors[3])


def test_permission_denied_is_its_own_error_and_names_file_and_root(root, opened, as_somebody):
    os.mkdir(root + b"/closed")
    for name in (b"/secret", b"/closed/file"):
        with open(root + name, "wb") as file:
            file.write(b"x")
    os.chmod(root + b"/secret", 0)
    os.chmod(root + b"/closed", 0)
    reading = opened()
    with as_somebody():  # who may not pass the directories above, but stands in this one
        errors = failures(reading, b".", [b"secret", b"closed/file"])
    assert [type(error) for error in errors] == [AccessDenied] * 2
    assert all(isinstance(error, PermissionError) for error in errors)
    assert errors[0].key == "secret"
    assert errors[0].__notes__ == ["below ."]


# Roots


def test_a_root_that_is_missing_or_a_file_fails_every_object(root, opened):
    reading = opened()
    for bad in (root + b"/nowhere", root + b"/good"):
        _, progress = reading.measured(bad, [b"a", b"b"])
        assert {type(error) for error in progress.failures.values()} == {ObjectNotFound}
        assert len(progress.failures) == 2


@pytest.mark.parametrize("below", [b"", b"/nowhere"])
def test_absolute_keys_need_no_root(root, opened, below):
    data, _ = opened().read(below, [root + b"/good"])
    assert data == [content("good", 5000)]


def test_a_root_that_is_a_link_leads_where_it_leads_now(root, opened):
    reading = opened()
    for version in (b"one", b"two"):
        os.mkdir(root + b"/" + version)
        with open(root + b"/" + version + b"/file", "wb") as file:
            file.write(version)
        if os.path.lexists(root + b"/now"):
            os.remove(root + b"/now")
        os.symlink(version, root + b"/now")
        assert reading.read(root + b"/now", [b"file"])[0] == [version]


# Descriptors


@pytest.fixture
def few_descriptors():
    """``few_descriptors(n)`` leaves n descriptors to this process until the test ends."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    def leave(n):
        used = {int(fd) for fd in os.listdir("/proc/self/fd")}
        free = (number for number in range(before[0]) if number not in used)
        last = next(itertools.islice(free, n - 1, None))
        resource.setrlimit(resource.RLIMIT_NOFILE, (last + 1, before[1]))

    yield leave
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def write_many(root, n):
    keys = [b"m%d" % i for i in range(n)]
    for key in keys:
        with open(root + b"/" + key, "wb") as file:
            file.write(content(key, 300))
    return keys


def test_more_files_are_measured_ahead_than_may_be_open(root, opened, few_descriptors):
    keys = write_many(root, 400)
    few_descriptors(DESCRIPTORS_KEPT + 8 + 40)
    reading = opened(concurrency=8)
    groups = [reading.ask(root, keys[i : i + 100]) for i in range(0, 400, 100)]
    sizes = {group: reading.wait(group).sizes for group in groups}
    assert len(os.listdir("/proc/self/fd")) <= resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 40
    for i, group in enumerate(groups):
        reading.storage.fetch(group, packed(sizes[group], first=i * 100 * 4096))
    for group in groups:
        assert not reading.wait(group).failures
    for i, key in enumerate(keys):
        assert reading.at(i * 4096, 300) == content(key, 300)
    assert reading.storage.counters().metadata_ops > 2 * 400 + 300


def test_concurrency_is_lowered_to_what_descriptors_allow_and_said(
    root, opened, few_descriptors, caplog
):
    keys = write_many(root, 60)
    few_descriptors(30)
    reading = opened(concurrency=64)
    assert "instead of 64" in caplog.text
    assert reading.read(root, keys)[0] == [content(key, 300) for key in keys]


def test_files_that_had_to_be_closed_are_known_again(root, opened, few_descriptors):
    for key in (b"same", b"grown", b"shrunk", b"replaced", b"removed"):
        with open(root + b"/" + key, "wb") as file:
            file.write(content(key, 20_000))
    few_descriptors(DESCRIPTORS_KEPT + 4)
    reading = opened(concurrency=4, part_bytes=8192)
    keys = [b"same", b"grown", b"shrunk", b"replaced", b"removed"]
    group, progress = reading.measured(root, keys)
    with open(root + b"/grown", "ab") as file:
        file.write(b"more")
    os.truncate(root + b"/shrunk", 100)
    with open(root + b"/new", "wb") as file:
        file.write(bytes(20_000))
    os.rename(root + b"/new", root + b"/replaced")
    os.remove(root + b"/removed")
    reading.storage.fetch(group, packed(progress.sizes))
    fetched = reading.wait(group)
    assert fetched.sizes.tolist() == [20_000, 20_000, -1, -1, -1]
    assert [type(fetched.failures[i]) for i in (2, 3, 4)] == [
        Truncated, StorageError, ObjectNotFound,
    ]  # fmt: skip
    assert "replaced" in str(fetched.failures[3])
    assert reading.at(0, 20_000) == content("same", 20_000)


class Hoard:
    """Takes every free descriptor, and gives them back."""

    def __init__(self):
        self.fds = []
        with pytest.raises(OSError, match="Too many open files"):
            self._take_all()

    def _take_all(self):
        while True:
            self.fds.append(os.open("/dev/null", os.O_RDONLY))

    def give_back(self):
        while self.fds:
            os.close(self.fds.pop())


@pytest.fixture
def hoard(few_descriptors):
    """``hoard()`` leaves no descriptor at all, until ``give_back``."""
    hoards = []

    def take():
        hoards.append(Hoard())
        return hoards[-1]

    few_descriptors(300)
    yield take
    for one in hoards:
        one.give_back()


def test_an_open_waits_for_a_descriptor(root, opened, hoard):
    reading = opened(concurrency=4)
    reading.read(root, [b"good"])
    taken = hoard()
    group = reading.ask(root, [b"good"] * 6)
    assert not reading.readable(0.05)
    taken.give_back()
    progress = reading.wait(group)
    assert not progress.failures
    assert reading.storage.counters().retries > 0


def test_files_that_wait_to_be_fetched_give_their_descriptors_to_who_needs_them(
    root, opened, hoard
):
    keys = write_many(root, 30)
    reading = opened(concurrency=4)
    first, progress = reading.measured(root, keys)
    taken = hoard()
    began = time.perf_counter()
    second, _ = reading.measured(root, [b"good"])
    assert time.perf_counter() - began < 2
    reading.storage.fetch(first, packed(progress.sizes))
    assert not reading.wait(first).failures
    reading.storage.fetch(second, np.array([40 * 4096]))
    assert not reading.wait(second).failures
    taken.give_back()
    assert reading.at(29 * 4096, 300) == content(keys[29], 300)
    assert reading.at(40 * 4096, 5000) == content("good", 5000)


def test_waiting_for_a_descriptor_ends_with_the_group(root, opened, hoard):
    reading = opened(concurrency=4)
    reading.read(root, [b"good"])
    taken = hoard()
    group = reading.ask(root, [b"good"] * 6)
    time.sleep(0.02)
    reading.storage.discard(group)
    time.sleep(0.05)
    taken.give_back()
    assert reading.read(root, [b"good"])[0] == [content("good", 5000)]


def test_closing_does_not_wait_for_a_descriptor(root, opened, hoard):
    reading = opened(concurrency=4)
    reading.read(root, [b"good"])
    hoard()
    reading.ask(root, [b"good"] * 6)
    time.sleep(0.01)
    began = time.perf_counter()
    reading.storage.close()
    assert time.perf_counter() - began < 0.5


# Leases, the page cache, O_DIRECT


def test_a_file_under_a_lease_is_waited_for(root, opened):
    broken = []
    before = signal.signal(signal.SIGIO, lambda number, frame: broken.append(number))
    holder = os.open(root + b"/good", os.O_RDWR)
    try:
        fcntl.fcntl(holder, F_SETLEASE, fcntl.F_WRLCK)
        reading = opened()
        group = reading.ask(root, [b"good"])
        deadline = time.monotonic() + PATIENCE
        while not broken and time.monotonic() < deadline:
            assert not reading.readable(0.05)
        assert broken == [signal.SIGIO]  # the kernel asked the holder for its lease
        assert not reading.readable(0.05)
        fcntl.fcntl(holder, F_SETLEASE, fcntl.F_UNLCK)
        assert not reading.wait(group).failures
        reading.storage.fetch(group, np.zeros(1, np.int64))
        assert reading.wait(group).sizes.tolist() == [5000]
    finally:
        os.close(holder)
        signal.signal(signal.SIGIO, before)


def cached(path):
    """Whether the first page can be read without waiting for the device."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.preadv(fd, [bytearray(4096)], 0, os.RWF_NOWAIT) > 0
    except BlockingIOError:
        return False
    finally:
        os.close(fd)


def test_files_are_dropped_from_the_page_cache_before_they_are_read(root, opened):
    path = root + b"/good"
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    assert cached(path)
    reading = opened(drop_cache=True)
    group, _ = reading.measured(root, [b"good"])
    assert reading.storage.counters().cache_dropped_files == 1
    assert not cached(path) or os.statvfs(path).f_fsid == 0  # a file system in memory drops nothing
    reading.storage.fetch(group, np.array([DROP]))
    assert reading.wait(group).sizes.tolist() == [5000]


def test_direct_reads_want_aligned_places_and_rounded_room(root, opened):
    reading = opened(direct="fallback")
    group, _ = reading.measured(root, [b"good"])
    end = len(reading.arena)
    for place in (1, 512, end - 4096):
        with pytest.raises(rayloader.errors.UsageError):
            reading.storage.fetch(group, np.array([place]))
    reading.storage.fetch(group, np.array([end - 8192]))
    assert reading.wait(group).sizes.tolist() == [5000]
    assert reading.at(end - 8192, 5000) == content("good", 5000)


@pytest.mark.parametrize("engine", ["native", "python"])
def test_direct_reads_want_aligned_memory(engine):
    storage = open_posix(StorageSpec(engine=engine, direct=True))
    with pytest.raises(rayloader.errors.UsageError, match="multiple of 4096"):
        storage.attach(memoryview(mmap.mmap(-1, 8192))[1:])
    storage.close()


@pytest.mark.parametrize("refuses", ["open", "read"])
def test_refused_direct_reads_are_an_error_or_a_counted_fallback(mount, opened, refuses):
    where = mount.open_errors if refuses == "open" else mount.errors
    mount.files[b"f"] = content("f", 50_000)
    mount.files[b"g"] = content("g", 50_000)
    where[b"f"] = [errno.EINVAL]
    reading = opened(direct=True, part_bytes=8192)
    group, progress = reading.measured(mount.root, [b"f", b"g"])
    reading.storage.fetch(group, packed(progress.sizes))
    fetched = reading.wait(group)
    error = (progress.failures | fetched.failures)[0]
    assert type(error) is DirectUnsupported
    assert fetched.sizes.tolist() == [-1, 50_000]

    where[b"f"] = [errno.EINVAL]
    reading = opened(direct="fallback", part_bytes=8192)
    data, _ = reading.read(mount.root, [b"f", b"g"])
    assert data == [content("f", 50_000), content("g", 50_000)]
    count = reading.storage.counters()
    assert count.direct_fallback_files == 1
    assert count.direct_bytes >= 50_000


# What a remote file system may answer


def test_stale_handles_are_opened_again_and_counted(mount, opened):
    mount.files[b"f"] = content("f", 50_000)
    mount.errors[b"f"] = [errno.ESTALE]
    reading = opened(concurrency=1)
    assert reading.read(mount.root, [b"f"])[0] == [content("f", 50_000)]
    assert reading.storage.counters().retries == 1


def test_a_handle_that_stays_stale_is_an_error(mount, opened):
    mount.files[b"f"] = content("f", 50_000)
    mount.errors[b"f"] = [errno.ESTALE] * 100
    reading = opened(concurrency=1)
    group, _ = reading.measured(mount.root, [b"f"])
    reading.storage.fetch(group, np.zeros(1, np.int64))
    error = reading.wait(group).failures[0]
    assert (type(error), error.errno) == (StorageError, errno.ESTALE)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENODATA, errno.ETIMEDOUT])
def test_an_error_in_one_range_fails_its_file_and_no_other(mount, opened, number):
    for key in (b"f", b"g"):
        mount.files[key] = content(key, 50_000)
    mount.errors[b"f"] = [number]
    reading = opened(part_bytes=8192)
    group, progress = reading.measured(mount.root, [b"f", b"g"])
    places = packed(progress.sizes)
    reading.storage.fetch(group, places)
    fetched = reading.wait(group)
    assert fetched.failures[0].errno == number
    assert fetched.sizes.tolist() == [-1, 50_000]
    assert reading.at(places[1], 50_000) == content("g", 50_000)
    assert reading.read(mount.root, [b"f"])[0] == [content("f", 50_000)]


def test_a_read_that_would_block_is_read_blocking(mount, opened):
    mount.files[b"f"] = content("f", 5000)
    mount.errors[b"f"] = [errno.EAGAIN]
    assert opened().read(mount.root, [b"f"])[0] == [content("f", 5000)]


@pytest.mark.parametrize("direct", [False, "fallback"])
def test_reads_cut_short_are_continued(mount, opened, direct):
    mount.files[b"f"] = content("f", 50_001)
    mount.most = 5000
    reading = opened(part_bytes=16384, direct=direct)
    assert reading.read(mount.root, [b"f"])[0] == [content("f", 50_001)]
    assert reading.storage.counters().reads == 4


def test_a_file_that_does_not_answer_holds_up_no_file_taken_with_it(mount, opened):
    mount.files[b"quick"] = content("quick", 100)
    mount.files[b"slow"] = content("slow", 100)
    mount.cached.add(b"quick")
    mount.stuck.add(b"slow")
    reading = opened(concurrency=64)
    # Enough quick reads before it that they are taken many at a time when its turn comes.
    keys = [b"quick"] * 1200 + [b"slow"] + [b"quick"] * 200
    group, _ = reading.measured(mount.root, keys)
    reading.storage.fetch(group, np.full(len(keys), DROP))
    reading.until(lambda: reading.storage.counters().reads == 1400, "all reads but one")
    assert reading.storage.oldest_read()[1] == "slow"
    mount.release(b"slow")
    assert not reading.wait(group).failures


def test_a_finished_group_is_told_though_those_asked_for_with_it_hang(mount, opened):
    mount.files |= {name: content(name, 100) for name in (b"quick", b"late", b"lost", b"gone")}
    mount.cached.add(b"quick")
    mount.stuck |= {b"late", b"lost", b"gone"}
    reading = opened(concurrency=64)
    groups = [reading.measured(mount.root, [name])[0] for name in mount.files]
    for group in groups:
        reading.storage.fetch(group, np.array([DROP]))
    assert not reading.wait(groups[0]).failures
    mount.release(b"late")
    assert reading.readable(timeout=PATIENCE)
    assert not reading.wait(groups[1]).failures
    mount.release(b"lost")
    mount.release(b"gone")


# Sizes


def test_offsets_beyond_four_gigabytes_are_read(root, opened):
    size = (4 << 30) + 8192
    with open(root + b"/sparse", "wb") as file:
        file.truncate(size)
        file.seek(size - 4)
        file.write(b"tail")
    # Around the page cache, which need not hold four gigabytes of nothing.
    reading = opened(scratch_bytes=4 << 20, concurrency=2, direct="fallback")
    group, progress = reading.measured(root, [b"sparse"])
    assert progress.sizes.tolist() == [size]
    reading.storage.fetch(group, np.array([DROP]))
    assert reading.wait(group).sizes.tolist() == [size]
    assert reading.storage.counters().bytes_transferred == size


def test_part_buffers_stay_within_their_bound(root, opened):
    with open(root + b"/large", "wb") as file:
        file.write(bytes(100_000))
    reading = opened(scratch_bytes=64 << 10, concurrency=8)
    group, _ = reading.measured(root, [b"large"])
    reading.storage.fetch(group, np.array([DROP]))
    assert reading.wait(group).sizes.tolist() == [100_000]
    assert reading.storage.counters().reads == -(-100_000 // 8192)
    reading.storage.set_concurrency(1)
    group, _ = reading.measured(root, [b"large"])
    reading.storage.fetch(group, np.array([DROP]))
    reading.wait(group)
    assert reading.storage.counters().reads == -(-100_000 // 8192) + 2


# The process around it


@pytest.mark.parametrize(
    ("quotas", "cpus"),
    [({}, 1 << 20), ({"": "max 100000", "/a": "150000 100000"}, 2), ({"": "50000 100000"}, 1)],
)
def test_a_cgroup_quota_is_a_number_of_cpus(tmp_path, quotas, cpus):
    (tmp_path / "a" / "b").mkdir(parents=True)
    for cgroup, text in quotas.items():
        (tmp_path / cgroup.strip("/") / "cpu.max").write_text(text + "\n")
    assert cgroup_cpus(str(tmp_path), "/a/b") == cpus


ENDS = """
import os, sys, mmap, numpy as np
from rayloader.storage import StorageSpec, Keys, open_storage
storage = open_storage(StorageSpec(engine=sys.argv[1]))
memory = mmap.mmap(-1, 1 << 22)
storage.attach(memoryview(memory))
storage.measure(1, os.fsencode(sys.argv[2]), Keys.of([b"good"] * 500))
how = sys.argv[3]
if how == "fork" and os.fork():
    os.wait()
if how == "raise":
    raise SystemExit(0)
"""


@pytest.mark.parametrize("engine", ["native", "python"])
@pytest.mark.parametrize("how", ["end", "fork", "raise"])
def test_a_process_ends_with_reads_under_way(root, engine, how):
    command = [sys.executable, "-c", ENDS, engine, os.fsdecode(root), how]
    ran = subprocess.run(command, capture_output=True, timeout=PATIENCE)
    assert (ran.returncode, ran.stderr) == (0, b"")


def test_a_storage_that_nobody_holds_ends_its_threads(root, opened):
    before = len(os.listdir("/proc/self/task"))
    for engine in ("native", "python"):
        storage = open_posix(StorageSpec(engine=engine))
        storage.measure(1, root, Keys.of([b"good"] * 3))
        del storage
    deadline = time.monotonic() + PATIENCE
    while len(os.listdir("/proc/self/task")) > before:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_memory_that_is_a_mapping_can_be_closed_after_the_storage(root, opened):
    memory = mmap.mmap(-1, 1 << 20)
    storage = open_posix(StorageSpec())
    storage.attach(memoryview(memory))
    with pytest.raises(BufferError):
        memory.close()
    storage.close()
    memory.close()


def test_python_signals_are_not_the_readers_business(root, opened):
    reading = opened()
    reading.read(root, [b"good"])
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/status") as file:
            status = dict(line.split(":\t", 1) for line in file)
        if reading.storage.engine == "native" and status["Name"].startswith("rayloader"):
            assert int(status["SigBlk"], 16) >> (signal.SIGINT - 1) & 1
            break
    else:
        assert reading.storage.engine == "python"
    assert SKIP == -2
