"""The POSIX engine in Python threads, for machines without the C extension.

``Engine`` is the same as ``_native.Engine`` (``posix.Engine`` describes both), and works in outline
as _engine.c explains: operations in a queue, an ``active`` limit on the workers awake, which begins
at the number of CPUs, a sentry that doubles it when too few workers run because they are blocked.
It differs where the GIL asks for it: operations are taken one by one; waiting for the GIL is not
being blocked: the sentry asks where a thread sleeps, and it also does the halving.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import errno
import fcntl
import mmap
import os
import random
import stat
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from rayloader.config import PAGE
from rayloader.errors import UsageError
from rayloader.storage import DROP, LATENCY_BUCKETS, SKIP, latency_bucket

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

TICK = 1e-3
LONGEST_TICK = 16e-3
"""The sentry looks after ``TICK``, then at doubling intervals while nothing is amiss [s]."""
QUIET_TICKS = 64
"""Looks without work before the sentry sleeps."""
CALM_TICKS = 8
"""Looks in a row without a blocked worker that halve ``active``."""
SAMPLES = 4
"""Workers asked for their state per look."""
UNKNOWN = 2e-3
"""Where /proc tells nothing: an operation this old counts as blocked [s]."""
STALE_RETRIES = 2
FD_PATIENCE = 5.0
"""How long an open waits for a free descriptor [s]."""
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


class FileCode(enum.IntEnum):
    """Why a file failed where the system has no number for it; the same as in _engine.h."""

    NOT_REGULAR = -1
    TRUNCATED = -2
    NO_DIRECT = -3
    REPLACED = -4
    BAD_NAME = -5


class _Direct(enum.IntEnum):
    NO = 0
    DEMANDED = 1
    PREFERRED = 2


class _Stage(enum.Enum):
    """MEASURING → MEASURED → FETCHING → FETCHED."""

    MEASURING = 1
    MEASURED = 2
    FETCHING = 3
    FETCHED = 4


class _Kind(enum.Enum):
    MEASURE = 1
    READ = 2
    SKIP = 3
    CLOSE = 4


class _Failed(Exception):
    """One file failed, with this code."""

    def __init__(self, code: int) -> None:
        self.code = code


class _Group:
    """Some files on their way. Guarded by the engine's lock, except for the files of a run."""

    def __init__(
        self, number: int, root: bytes, blob: bytes, offsets: list[int], direct: bool
    ) -> None:
        n = len(offsets) - 1
        self.number = number
        self.root = root
        self.root_fd = -1
        self.blob = blob
        self.offsets = offsets
        self.n = n
        self.stage = _Stage.MEASURING
        self.discarded = False
        self.users = 0
        self.unfinished = n
        self.fds = [-1] * n
        self.sizes = [-1] * n
        self.codes = [0] * n
        self.busy = [0] * n
        self.identities: list[tuple[int, int]] = [(0, 0)] * n
        self.places = [SKIP] * n
        self.parts_left = [0] * n
        self.direct = [direct] * n

    def name(self, i: int) -> bytes:
        return self.blob[self.offsets[i] : self.offsets[i + 1]]

    def ops(self, part: int, scratch_part: int) -> Iterator[_Op]:
        """The operations of the stage that begins."""
        for i in range(self.n):
            place, size = self.places[i], self.sizes[i]
            if self.stage is _Stage.MEASURING:
                yield _Op(self, _Kind.MEASURE, i)
            elif place == SKIP or size == 0:
                yield _Op(self, _Kind.SKIP, i)
            else:
                step = scratch_part if place == DROP else part
                self.parts_left[i] = -(-size // step)
                for offset in range(0, size, step):
                    yield _Op(self, _Kind.READ, i, offset, min(step, size - offset))

    def take_resting(self) -> list[int]:
        """The descriptors of all files that no operation is about; the group forgets them."""
        resting = [i for i in range(self.n) if self.fds[i] >= 0 and not self.busy[i]]
        fds = [self.fds[i] for i in resting]
        for i in resting:
            self.fds[i] = -1
        return fds

    def close_file(self, i: int) -> int:
        """Close file i; how many were open [files]."""
        fd, self.fds[i] = self.fds[i], -1
        if fd < 0:
            return 0
        os.close(fd)
        return 1

    def close_files(self) -> int:
        """Close everything; how many files were open [files]."""
        self.close_root()
        return sum(self.close_file(i) for i in range(self.n))

    def close_root(self) -> None:
        """Close the directory. It is open as a path only, so this asks no file system."""
        fd, self.root_fd = self.root_fd, -1
        if fd >= 0:
            os.close(fd)

    def result(self) -> tuple[int, bytes, bytes | None]:
        """What ``Engine.collect`` gives."""
        read = self.stage is _Stage.FETCHED
        kept = [not (read and place == SKIP) for place in self.places]
        codes = [code if keep else 0 for code, keep in zip(self.codes, kept, strict=True)]
        sizes = [
            size if keep and not code else -1
            for size, code, keep in zip(self.sizes, codes, kept, strict=True)
        ]
        packed = np.array(codes, np.int32).tobytes() if any(codes) else None
        return self.number, np.array(sizes, np.int64).tobytes(), packed


@dataclasses.dataclass(slots=True)
class _Op:
    """One file to measure, one range to read (or a file to leave unread), or a group to close."""

    group: _Group
    kind: _Kind
    file: int = -1
    offset: int = 0
    length: int = 0
    keep: bool = False
    """The measured file may stay open."""
    last: bool = False
    """No range of the file is left to read."""
    closed: int = 0
    """Files closed with it [files]."""


@dataclasses.dataclass(slots=True)
class _Tally:
    """One worker's share of the counters."""

    metadata_ops: int = 0
    reads: int = 0
    bytes: int = 0
    retries: int = 0
    read_seconds: float = 0.0
    latency: list[int] = dataclasses.field(default_factory=lambda: [0] * LATENCY_BUCKETS)
    direct_bytes: int = 0
    fallback_files: int = 0
    dropped_files: int = 0


def _round_up(size: int) -> int:
    return (size + PAGE - 1) // PAGE * PAGE


class _Files:
    """Opens, measures and reads single files for one worker; every failure is a ``_Failed``."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._scratch: mmap.mmap | None = None
        self.tally = _Tally()

    def measure(self, group: _Group, i: int, keep: bool) -> None:
        if b"\0" in group.name(i):
            raise _Failed(FileCode.BAD_NAME)
        fd, status = self._open(group, i)
        group.identities[i] = (status.st_dev, status.st_ino)
        group.sizes[i] = status.st_size
        if self._engine.drop_cache:
            with contextlib.suppress(OSError):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                self.tally.dropped_files += 1
        if keep:
            group.fds[i] = fd
        else:
            os.close(fd)

    def read(self, group: _Group, i: int, offset: int, length: int) -> None:
        """Read a range into its place."""
        place = group.places[i]
        if place == DROP:
            view = self._scratch_view(length)
        else:
            start = place + offset
            room = _round_up(length) if group.direct[i] else length
            view = self._engine.view(start, room)
        began = time.perf_counter()
        try:
            self._read_range(group, i, offset, length, view)
        finally:
            seconds = time.perf_counter() - began
            self.tally.reads += 1
            self.tally.read_seconds += seconds
            self.tally.latency[latency_bucket(seconds)] += 1

    def drop_scratch(self) -> None:
        self._scratch = None

    def _scratch_view(self, length: int) -> memoryview:
        length = _round_up(length)
        if self._scratch is None or len(self._scratch) < length:
            self._scratch = mmap.mmap(-1, length)
        return memoryview(self._scratch)[:length]

    def _open(self, group: _Group, i: int) -> tuple[int, os.stat_result]:
        """Open a file and learn what it is; only a regular one is given."""
        name, direct, refused = group.name(i), group.direct[i], False
        root = None if name.startswith(b"/") else self._root(group)
        try:
            fd = self._open_at(group, root, name, _FLAGS | (os.O_DIRECT if direct else 0))
        except _Failed as error:
            if error.code != errno.EINVAL or not direct:
                raise
            refused = True  # or it is no file at all: look, before O_DIRECT is blamed
            fd = self._open_at(group, root, name, _FLAGS)
        try:
            self.tally.metadata_ops += 1
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise _Failed(FileCode.NOT_REGULAR)
            if refused and self._engine.direct is _Direct.DEMANDED:
                raise _Failed(FileCode.NO_DIRECT)
            if refused:
                self._fall_back(group, i)
        except OSError as error:
            os.close(fd)
            raise _Failed(error.errno or errno.EIO) from error
        except _Failed:
            os.close(fd)
            raise
        return fd, status

    def _root(self, group: _Group) -> int | None:
        """The group's directory, opened anew for each group: a root may be a symbolic link."""
        if not group.root:
            return None
        if group.root_fd < 0:
            flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
            fd = self._open_at(group, None, group.root, flags)
            if not self._engine.keep_root(group, fd):
                os.close(fd)
        return group.root_fd

    def _open_at(self, group: _Group, root: int | None, name: bytes, flags: int) -> int:
        waited, stale = 0.0, 0
        while True:
            self.tally.metadata_ops += 1
            try:
                return os.open(name, flags, dir_fd=root)
            except BlockingIOError:
                return self._open_leased(root, name, flags)
            except ValueError as error:  # a NUL byte in the root
                raise _Failed(FileCode.BAD_NAME) from error
            except OSError as error:
                code = error.errno or errno.EIO
            if code in (errno.EMFILE, errno.ENFILE):
                waited = self._await_descriptor(group, waited, code)
            elif code == errno.ESTALE and stale < STALE_RETRIES:
                stale += 1
                self.tally.retries += 1
            else:
                raise _Failed(code)

    def _open_leased(self, root: int | None, name: bytes, flags: int) -> int:
        """Open a file under somebody's lease: O_NONBLOCK refuses, waiting is right."""
        try:
            path = os.open(name, os.O_PATH | os.O_CLOEXEC, dir_fd=root)
            try:
                if not stat.S_ISREG(os.fstat(path).st_mode):
                    raise _Failed(FileCode.NOT_REGULAR)
                # Through /proc it is surely the file looked at, never a FIFO put in its place.
                return os.open(f"/proc/self/fd/{path}", flags & ~os.O_NONBLOCK)
            finally:
                os.close(path)
        except OSError as error:
            raise _Failed(error.errno or errno.EIO) from error

    def _await_descriptor(self, group: _Group, waited: float, code: int) -> float:
        self.tally.retries += 1
        if self._engine.shed_files():
            return waited
        if waited >= FD_PATIENCE or group.discarded or self._engine.stopped:
            raise _Failed(code)
        pause = 1e-3 if waited < 0.02 else 0.02
        time.sleep(pause)
        return waited + pause

    def _reopen(self, group: _Group, i: int) -> int:
        """Open a measured file again, and make sure that it is the same."""
        fd, status = self._open(group, i)
        if (status.st_dev, status.st_ino) != group.identities[i]:
            os.close(fd)
            raise _Failed(FileCode.REPLACED)
        if status.st_size < group.sizes[i]:
            os.close(fd)
            raise _Failed(FileCode.TRUNCATED)
        return fd

    def _read_range(
        self, group: _Group, i: int, offset: int, length: int, view: memoryview
    ) -> None:
        fd, own, stale = group.fds[i], -1, 0
        try:
            while True:
                if fd < 0:
                    fd = own = self._reopen(group, i)
                try:
                    return self._read_from(fd, group, i, offset, length, view)
                except OSError as error:
                    if error.errno != errno.ESTALE or stale >= STALE_RETRIES:
                        raise _Failed(error.errno or errno.EIO) from error
                stale += 1  # all of the range again, from one open file
                self.tally.retries += 1
                if own >= 0:
                    os.close(own)
                fd = own = -1
        finally:
            if own >= 0:
                os.close(own)

    def _read_from(
        self, fd: int, group: _Group, i: int, offset: int, length: int, view: memoryview
    ) -> None:
        got, end, patient, refused = 0, -1, False, 0
        while got < length:
            direct = group.direct[i]
            start = got // PAGE * PAGE if direct else got
            stop = _round_up(length) if direct else length
            try:
                n = os.preadv(fd, [view[start:stop]], offset + start)
            except BlockingIOError:
                if patient:
                    raise
                patient = True  # some file system takes O_NONBLOCK seriously
                os.set_blocking(fd, True)
                continue
            except OSError as error:
                if error.errno != errno.EINVAL or self._engine.direct is _Direct.NO:
                    raise
                refused += 1
                self._without_direct(fd, group, i, refused)
                continue
            self.tally.bytes += n
            self.tally.direct_bytes += n if direct else 0
            got = start + n
            # O_DIRECT starts again at the last page; the same end twice is the end.
            if n == 0 or (got < length and got == end):
                raise _Failed(FileCode.TRUNCATED)
            end = got

    def _without_direct(self, fd: int, group: _Group, i: int, refused: int) -> None:
        if self._engine.direct is _Direct.DEMANDED:
            raise _Failed(FileCode.NO_DIRECT)
        if refused > 2:  # another range of the file may have been taking O_DIRECT off
            raise _Failed(errno.EINVAL)
        self._fall_back(group, i)
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)

    def _fall_back(self, group: _Group, i: int) -> None:
        self.tally.fallback_files += self._engine.fell_back(group, i)


class _Worker:
    """A thread that carries out operations, one at a time, until the engine stops."""

    def __init__(self, engine: Engine) -> None:
        self.files = _Files(engine)
        self.op: _Op | None = None
        self.began = 0.0
        """When the operation in flight began, 0.0 between two [s, perf_counter]."""
        self.notify = False
        """It has finished something that the owner must hear of, once the lock is free."""
        self.called = threading.Semaphore(0)
        self._engine = engine
        self.thread = threading.Thread(target=self._main, name="rayloader-read", daemon=True)

    def _main(self) -> None:
        while self._engine.next_op(self):
            self.began = time.perf_counter()
            self._carry_out()
            self.began = 0.0
        self.files.drop_scratch()
        self._engine.leave()

    def _carry_out(self) -> None:
        op = self.op
        assert op is not None
        group, i = op.group, op.file
        try:
            if op.kind is _Kind.READ:
                if not group.codes[i]:
                    self.files.read(group, i, op.offset, op.length)
            elif op.kind is _Kind.MEASURE:
                self.files.measure(group, i, op.keep)
        except _Failed as failure:
            group.codes[i] = group.codes[i] or failure.code
        except OSError as error:
            group.codes[i] = group.codes[i] or error.errno or errno.EIO
        if op.kind is _Kind.CLOSE:
            op.closed = group.close_files()
        elif op.kind is not _Kind.MEASURE:
            op.last = op.kind is _Kind.SKIP or self._engine.is_last(op)
            op.closed = group.close_file(i) if op.last else 0


class Engine:
    """Bulk reads of POSIX files in Python threads. See ``posix.Engine``."""

    def __init__(
        self,
        *,
        concurrency: int,
        cpus: int,
        part_bytes: int,
        scratch_part_bytes: int,
        direct: int,
        drop_cache: bool,
        fd_budget: int,
    ) -> None:
        parts = (part_bytes, scratch_part_bytes)
        if min(concurrency, cpus, *parts) < 1 or any(p % PAGE for p in parts) or fd_budget < 0:
            raise UsageError("an option of the engine is out of range")
        self.direct = _Direct(direct)
        self.drop_cache = drop_cache
        self.stopped = False
        self._pid = os.getpid()
        self._closed = False
        self._concurrency = concurrency
        self._cpus = cpus
        self._part = part_bytes
        self._scratch_part = scratch_part_bytes
        self._fd_budget = fd_budget
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._signalled = False
        self._memory: memoryview | None = None
        self._lock = threading.Lock()
        self._gone = threading.Condition(self._lock)
        self._groups: dict[int, _Group] = {}
        self._queue: deque[_Op] = deque()
        self._done: dict[int, _Group] = {}
        self._unsettled: set[_Group] = set()
        self._open_files = 0
        self._workers: list[_Worker] = []
        self._idle: list[_Worker] = []
        self._alive = 0
        self._awake = 0
        self._active = cpus
        self._reading = 0
        self._peak = 0
        self._sentry: threading.Thread | None = None
        self._sentry_wake = threading.Condition(self._lock)
        self._armed = False
        self._calm = 0

    # ---- the owner's calls

    def fileno(self) -> int:
        self._check()
        return self._event

    def attach(self, memory: memoryview, /) -> None:
        self._check()
        if self._memory is not None:
            raise UsageError("memory is attached already")
        view = memoryview(memory).cast("B")
        if view.readonly:
            raise BufferError("the memory is not writable")
        if self.direct is not _Direct.NO and np.frombuffer(view, np.uint8).ctypes.data % PAGE:
            raise UsageError("O_DIRECT needs memory that begins at a multiple of 4096")
        self._memory = view

    def measure(
        self, number: int, root: bytes, blob: bytes, offsets: npt.NDArray[np.int64], /
    ) -> None:
        self._check()
        ends = np.asarray(offsets)
        if ends.dtype != np.int64 or ends.ndim != 1:
            raise TypeError("expected a one-dimensional buffer of int64")
        bad = (
            not len(ends) or ends[0] < 0 or ends[-1] > len(blob) or bool((np.diff(ends) < 0).any())
        )
        if bad:
            raise UsageError("offsets do not fit the names")
        group = _Group(number, root, blob, ends.tolist(), self.direct is not _Direct.NO)
        with self._lock:
            if number in self._groups:
                raise UsageError(f"group {number} is in use")
            self._submit(group)
            self._groups[number] = group

    def fetch(self, number: int, places: npt.NDArray[np.int64], /) -> None:
        self._check()
        wanted = np.asarray(places)
        if wanted.dtype != np.int64 or wanted.ndim != 1:
            raise TypeError("expected a one-dimensional buffer of int64")
        with self._lock:
            group = self._groups.get(number)
            if group is None or group.stage is not _Stage.MEASURED or number in self._done:
                raise UsageError(f"group {number} is not a measured one")
            if len(wanted) != group.n:
                raise UsageError(f"group {number} has another number of objects")
            places_list: list[int] = wanted.tolist()
            for i, place in enumerate(places_list):
                if not self._fits(group, i, place):
                    raise UsageError(
                        f"object {i} of group {number} cannot be read there: it was not measured, "
                        "or the place is not aligned or leaves no room"
                    )
            group.places = places_list
            group.stage = _Stage.FETCHING
            self._submit(group)

    def discard(self, number: int, /) -> None:
        self._check()
        with self._lock:
            group = self._groups.pop(number, None)
            if group is None:
                return
            self._done.pop(number, None)
            group.discarded = True
            if group.users == 0:
                self._retire(group)
            elif group.stage is _Stage.FETCHING:
                self._unsettled.add(group)

    def settled(self, group: int | None = None, /) -> bool:
        self._check()
        with self._lock:
            return all(group not in (None, one.number) for one in self._unsettled)

    def collect(self) -> list[tuple[int, bytes, bytes | None]]:
        self._check()
        with self._lock:
            done, self._done = self._done, {}
            for number, group in done.items():
                if group.stage is _Stage.FETCHED:
                    del self._groups[number]
            if self._signalled:
                with contextlib.suppress(BlockingIOError):  # who will write has not yet done so
                    os.eventfd_read(self._event)
                    self._signalled = False
        return [group.result() for group in done.values()]

    def counters(self) -> tuple[Any, ...]:
        self._check()
        tallies = [worker.files.tally for worker in list(self._workers)]
        total = _Tally()
        for field in dataclasses.fields(_Tally):
            if field.name != "latency":
                setattr(total, field.name, sum(getattr(tally, field.name) for tally in tallies))
        latency = tuple(map(sum, zip(total.latency, *(t.latency for t in tallies), strict=True)))
        return (
            total.metadata_ops, total.reads, total.bytes, total.retries, total.read_seconds,
            self._peak, latency, total.direct_bytes, total.fallback_files, total.dropped_files,
        )  # fmt: skip

    def reset_peak(self) -> None:
        self._check()
        with self._lock:
            self._peak = self._reading

    def set_concurrency(self, concurrency: int, scratch_part_bytes: int, /) -> None:
        self._check()
        if concurrency < 1 or scratch_part_bytes < 1 or scratch_part_bytes % PAGE:
            raise UsageError("an option of the engine is out of range")
        with self._lock:
            if scratch_part_bytes != self._scratch_part:
                for worker in self._idle:
                    worker.files.drop_scratch()
            self._concurrency = concurrency
            self._scratch_part = scratch_part_bytes
            while self._call_one():
                pass
            self._arm()

    def oldest(self) -> tuple[float, bytes]:
        self._check()
        now, age, name = time.perf_counter(), 0.0, b""
        with self._lock:
            for worker in self._workers:
                op, began = worker.op, worker.began
                if op is None or op.kind is _Kind.CLOSE or op.group.discarded:
                    continue
                if began and now - began > age:
                    age, name = now - began, op.group.name(op.file)
        return age, name

    def close(self, grace: float = 0.2, /) -> int:
        if self._closed:
            return 0
        self._closed = True
        if self._pid != os.getpid():  # a forked child: the threads and the lock are the parent's
            os.close(self._event)
            return 0
        deadline = time.monotonic() + grace
        with self._lock:
            self.stopped = True
            self._retire_all()
            self._sentry_wake.notify_all()
            for worker in self._idle:
                worker.called.release()
            while self._alive and (left := deadline - time.monotonic()) > 0:
                self._gone.wait(left)
            left_behind = self._alive
        if left_behind:  # they write into the memory until they return, and close their files then
            return left_behind
        for thread in [*(worker.thread for worker in self._workers), self._sentry]:
            if thread is not None:
                thread.join()
        os.close(self._event)
        if self._memory is not None:
            self._memory.release()
        return 0

    # ---- the workers' calls

    def next_op(self, worker: _Worker) -> bool:
        """End the worker's operation and give it the next, as soon as there is one for it."""
        with self._lock:
            if worker.op is not None:
                self._end(worker, worker.op)
            while not self.stopped or self._queue:
                if self._queue and (self.stopped or self._awake <= self._limit()):
                    self._begin(worker, self._queue.popleft())
                    if worker.op is not None:
                        self._call_one()
                        self._arm()
                        break
                else:
                    self._park(worker)
        self._tell(worker)
        return worker.op is not None

    def leave(self) -> None:
        """A thread's last call."""
        with self._lock:
            self._alive -= 1
            self._gone.notify_all()

    def is_last(self, op: _Op) -> bool:
        """True when no other range of the operation's file is left to read."""
        with self._lock:
            op.group.parts_left[op.file] -= 1
            return op.group.parts_left[op.file] == 0

    def view(self, start: int, length: int) -> memoryview:
        """Some of the attached memory."""
        assert self._memory is not None
        return self._memory[start : start + length]

    def fell_back(self, group: _Group, i: int) -> bool:
        """The file is read without O_DIRECT from now on. True the first time."""
        with self._lock:
            first = group.direct[i]
            group.direct[i] = False
            return first

    def keep_root(self, group: _Group, fd: int) -> bool:
        """Keep the group's directory open. False when another worker was first."""
        with self._lock:
            if group.root_fd < 0:
                group.root_fd = fd
            return group.root_fd == fd

    def shed_files(self) -> bool:
        """Close the files at rest of the group that will be fetched last. True if there was one."""
        with self._lock:
            for group in reversed(list(self._groups.values())):
                fds = group.take_resting()
                if fds:
                    break
            else:
                return False
            self._open_files -= len(fds)
            self._fd_budget = min(self._fd_budget, self._open_files)  # it was set too high
        for fd in fds:
            os.close(fd)
        return True

    # ---- under the lock

    def _check(self) -> None:
        if self._closed:
            raise UsageError("the engine is closed")
        if self._pid != os.getpid():
            raise UsageError(
                "the engine belongs to the process that opened it, not to a forked child"
            )

    def _fits(self, group: _Group, i: int, place: int) -> bool:
        if place == SKIP:
            return True
        if group.codes[i] or group.sizes[i] < 0 or place < DROP:
            return False
        if place == DROP:
            return True
        room = _round_up(group.sizes[i]) if group.direct[i] else group.sizes[i]
        memory = len(self._memory) if self._memory is not None else 0
        return place + room <= memory and not (group.direct[i] and place % PAGE)

    def _submit(self, group: _Group) -> None:
        group.unfinished = group.n
        self._queue.extend(group.ops(self._part, self._scratch_part))
        if group.n == 0 and self._complete(group):
            os.eventfd_write(self._event, 1)
        self._call_one()
        if self._queue and not self._workers:
            self._queue.clear()  # all of this group: no other can wait without a worker
            raise OSError("the system gives no thread to read with")

    def _limit(self) -> int:
        return min(self._active, self._concurrency)

    def _call_one(self) -> bool:
        """Wake or make one worker more, if there is work for it and room under the limit."""
        if self.stopped or not self._queue or self._awake >= self._limit():
            return False
        if self._idle:
            self._idle.pop().called.release()
        else:
            worker = _Worker(self)
            try:
                worker.thread.start()
            except RuntimeError:  # the system gives no more threads
                return False
            self._workers.append(worker)
            self._alive += 1
        self._awake += 1
        return True

    def _park(self, worker: _Worker) -> None:
        self._awake -= 1
        self._idle.append(worker)
        self._lock.release()
        try:
            self._tell(worker)
            worker.called.acquire()
        finally:
            self._lock.acquire()

    def _tell(self, worker: _Worker) -> None:
        """Tell the owner what the worker has finished. Not under the lock: this lets the GIL go."""
        if worker.notify:
            worker.notify = False
            os.eventfd_write(self._event, 1)

    def _begin(self, worker: _Worker, op: _Op) -> None:
        group = op.group
        if op.kind is not _Kind.CLOSE:
            if group.discarded:
                return
            group.users += 1
            group.busy[op.file] += 1
        if op.kind is _Kind.MEASURE:
            op.keep = self._open_files < self._fd_budget
            self._open_files += op.keep
        elif op.kind is _Kind.READ:
            self._reading += 1
            self._peak = max(self._peak, self._reading)
        worker.op = op

    def _end(self, worker: _Worker, op: _Op) -> None:
        worker.op, group = None, op.group
        if op.kind is _Kind.CLOSE:
            self._open_files -= op.closed
            return
        if op.kind is _Kind.MEASURE:
            self._open_files -= op.keep and group.fds[op.file] < 0
            group.unfinished -= 1
        else:
            self._reading -= op.kind is _Kind.READ
            self._open_files -= op.closed
            group.unfinished -= op.last
        group.busy[op.file] -= 1
        group.users -= 1
        if group.users == 0 and group.discarded:
            if group in self._unsettled:
                self._unsettled.remove(group)
                worker.notify = self._must_tell()
            self._retire(group)
        elif group.users == 0 and group.unfinished == 0:
            worker.notify = self._complete(group)

    def _complete(self, group: _Group) -> bool:
        """The stage is done. True when the owner must be told."""
        group.close_root()
        measured = group.stage is _Stage.MEASURING
        group.stage = _Stage.MEASURED if measured else _Stage.FETCHED
        self._done[group.number] = group
        return self._must_tell()

    def _must_tell(self) -> bool:
        must = not self._signalled and not self.stopped
        self._signalled = self._signalled or must
        return must

    def _retire(self, group: _Group) -> None:
        """Nobody's any more: a worker closes its files."""
        if group.root_fd >= 0 or any(fd >= 0 for fd in group.fds):
            self._queue.appendleft(_Op(group, _Kind.CLOSE))
            self._call_one()

    def _retire_all(self) -> None:
        closing = [op for op in self._queue if op.kind is _Kind.CLOSE]
        self._queue.clear()
        self._queue.extend(closing)
        for group in self._groups.values():
            group.discarded = True
            if group.users == 0:
                self._retire(group)
        self._groups.clear()
        self._done.clear()

    # ---- the sentry

    def _wants_sentry(self) -> bool:
        return bool(self._queue) or (self._active > self._cpus and self._awake > 0)

    def _arm(self) -> None:
        if self._armed or self._concurrency <= self._cpus or not self._wants_sentry():
            return
        if self._sentry is None:
            self._sentry = threading.Thread(target=self._watch, name="rayloader-watch", daemon=True)
            try:
                self._sentry.start()
            except RuntimeError:
                self._sentry = None  # tried again with the next operation
                return
            self._alive += 1
        self._armed = True
        self._sentry_wake.notify()

    def _watch(self) -> None:
        tick, quiet = TICK, 0
        with self._lock:
            while not self.stopped:
                if not self._armed:
                    self._sentry_wake.wait()
                    tick, quiet = TICK, 0
                    continue
                self._sentry_wake.wait(tick)
                quiet = 0 if self._wants_sentry() else quiet + 1
                if quiet > QUIET_TICKS:
                    self._armed = False
                elif not quiet:
                    tick = TICK if self._look() else min(2 * tick, LONGEST_TICK)
        self.leave()

    def _look(self) -> bool:
        """Ask some workers whether they are blocked, and change ``active``. True if it grew."""
        now = time.perf_counter()
        busy = [(w, now - began) for w in self._workers if (began := w.began)]
        if not busy:
            return False
        asked = random.sample(busy, min(SAMPLES, len(busy)))
        self._lock.release()
        try:
            blocked = sum(_is_blocked(worker.thread, age) for worker, age in asked)
        finally:
            self._lock.acquire()
        running = len(busy) * (len(asked) - blocked) / len(asked)
        self._calm = 0 if blocked else self._calm + 1
        grows = running < self._cpus and blocked > 0 and bool(self._queue)
        if grows:
            self._active = min(2 * self._active, max(self._concurrency, self._cpus))
        elif self._calm >= CALM_TICKS:
            self._active, self._calm = max(self._active // 2, self._cpus), 0
        while self._call_one():
            pass
        return grows


def _is_blocked(thread: threading.Thread, age: float) -> bool:
    """Whether a thread sleeps somewhere other than at a lock (the GIL, or ours).

    Its state is R on a CPU or waiting for one, D in most reads; S may be either.
    """
    place = f"/proc/self/task/{thread.native_id}"
    try:
        with open(f"{place}/stat", "rb") as file:
            state = file.read().rpartition(b") ")[2][:1]
        if state != b"S":
            return state == b"D"
        with open(f"{place}/wchan", "rb") as file:
            where = file.read()
    except OSError:
        return age > UNKNOWN
    return age > UNKNOWN if where in (b"", b"0") else not where.startswith(b"futex")
