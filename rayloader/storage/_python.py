"""The POSIX engine in Python threads, for machines without the C extension.

``Engine`` is the same as ``_native.Engine`` (``posix.Engine`` describes both), and works in outline
as _engine.c explains: runs of files are taken from a queue; an ``active`` limit on the workers
awake begins at the number of CPUs; a sentry doubles it when too few workers run because they are
blocked, and gives the rest of a blocked worker's run to the others. It differs in that waiting for
the GIL is not being blocked: the sentry asks where a thread sleeps, and it also does the halving.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import errno
import os
import random
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from rayloader.config import PAGE
from rayloader.errors import UsageError
from rayloader.storage import DROP, SKIP
from rayloader.storage._calls import Stage
from rayloader.storage._files import Direct, Failed, FileCode, Files, Group, Tally

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

__all__ = ["Engine", "FileCode"]

LONGEST_RUN = 16
"""Files that a worker takes at once while operations return at once [files]."""
QUICK = 500e-6
"""Operations that last longer are taken one by one [s]."""
STUCK = 2e-3
"""A blocked operation this old gives up the rest of its run [s]."""
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


class _Kind(enum.Enum):
    MEASURE = 1
    READ = 2
    SKIP = 3
    CLOSE = 4


@dataclasses.dataclass(slots=True)
class _Run:
    """What a worker does without looking up: some files of a group, or one range of one file."""

    group: Group
    kind: _Kind
    files: deque[int]
    """Those not begun. Its worker takes from them, and the sentry when that is blocked."""
    offset: int = 0
    length: int = 0
    """Of the range of a large file [bytes]; 0: the files are read whole."""
    about: frozenset[int] = frozenset()
    """All files of the run, while a worker has it."""
    taken: float = 0.0
    """When a worker took it [s, perf_counter]."""
    keep: int = 0
    """Measured files that may stay open [files]."""
    ended: int = 0
    opened: int = 0
    closed: int = 0

    def split(self, count: int) -> _Run:
        """The first files as a run of their own."""
        files = deque(self.files.popleft() for _ in range(count))
        return _Run(self.group, self.kind, files)


def _runs(group: Group, part: int, scratch_part: int) -> Iterator[_Run]:
    """All that the stage which begins asks for; neighbours that are read alike are one run."""
    if group.stage is Stage.MEASURING:
        yield _Run(group, _Kind.MEASURE, deque(range(group.n)))
        return
    kinds = [_kind(group, i, part, scratch_part) for i in range(group.n)]
    first = 0
    for i in range(1, group.n + 1):
        if i < group.n and kinds[i] is kinds[first] is not None:
            continue
        kind = kinds[first]
        if kind is None:
            yield from _ranges(group, first, part, scratch_part)
        else:
            yield _Run(group, kind, deque(range(first, i)))
        first = i


def _kind(group: Group, i: int, part: int, scratch_part: int) -> _Kind | None:
    """How file i is fetched; ``None``: in ranges."""
    place, size = group.places[i], group.sizes[i]
    if place == SKIP or (size == 0 and not group.expected):
        return _Kind.SKIP
    return _Kind.READ if size <= (scratch_part if place == DROP else part) else None


def _ranges(group: Group, i: int, part: int, scratch_part: int) -> Iterator[_Run]:
    size = group.sizes[i]
    step = scratch_part if group.places[i] == DROP else part
    group.parts_left[i] = -(-size // step)
    for offset in range(0, size, step):
        yield _Run(group, _Kind.READ, deque([i]), offset, min(step, size - offset))


class _Worker:
    """A thread that carries out runs until the engine stops."""

    def __init__(self, engine: Engine) -> None:
        self.files = Files(engine)
        self.run: _Run | None = None
        self.file = -1
        self.began = 0.0
        """When the operation in flight began, 0.0 between two [s, perf_counter]."""
        self.notify = False
        """It has finished something that the owner must hear of, once the lock is free."""
        self.called = threading.Semaphore(0)
        self._engine = engine
        self.thread = threading.Thread(target=self._main, name="rayloader-read", daemon=True)

    def _main(self) -> None:
        while (run := self._engine.next_run(self)) is not None:
            if run.kind is _Kind.CLOSE:
                run.closed = run.group.close_files()
            else:
                self._carry_out(run)
            self.began = 0.0
        self.files.drop_scratch()
        self._engine.leave()

    def _carry_out(self, run: _Run) -> None:
        group, files, one = run.group, run.files, self._fetch
        if run.kind is _Kind.MEASURE:
            one = self._measure
        while not (group.discarded or self._engine.stopped):
            try:
                i = files.popleft()
            except IndexError:
                return
            self.file = i
            self.began = time.perf_counter()
            try:
                one(run, group, i)
            except Failed as failure:
                group.fail(i, failure.code)
            except OSError as error:
                group.fail(i, error.errno or errno.EIO)
            run.ended += self._end(run, group, i)

    def _measure(self, run: _Run, group: Group, i: int) -> None:
        self.files.measure(group, i, keep=run.opened < run.keep)
        run.opened += group.fds[i] >= 0

    def _fetch(self, run: _Run, group: Group, i: int) -> None:
        if run.length:
            if not group.codes[i]:
                self.files.read(group, i, run.offset, run.length)
        elif run.kind is _Kind.READ:
            self.files.read(group, i, 0, group.sizes[i])

    def _end(self, run: _Run, group: Group, i: int) -> bool:
        """True when nothing more is to be done about the file in this stage."""
        if run.kind is _Kind.MEASURE:
            return True
        if run.length and not self._engine.is_last_range(group, i):
            return False
        run.closed += group.close_file(i)
        return True


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
        self.direct = Direct(direct)
        self.drop_cache = drop_cache
        self.stopped = False
        self._pid = os.getpid()
        self._closed = False
        self._concurrency = concurrency
        self._cpus = cpus
        self._part = part_bytes
        self.scratch_part = scratch_part_bytes
        self._fd_budget = fd_budget
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._signalled = False
        self.memory = memoryview(b"")
        self._attached = False
        self._lock = threading.Lock()
        self._gone = threading.Condition(self._lock)
        self._groups: dict[int, Group] = {}
        self._queue: deque[_Run] = deque()
        self._done: dict[int, Group] = {}
        self._unsettled: set[Group] = set()
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
        self._typical = dict.fromkeys(_Kind, QUICK)
        """Smoothed duration of one operation [s]."""

    # ---- the owner's calls

    def fileno(self) -> int:
        self._check()
        return self._event

    def attach(self, memory: memoryview, /) -> None:
        self._check()
        if self._attached:
            raise UsageError("memory is attached already")
        view = memoryview(memory).cast("B")
        if view.readonly:
            raise BufferError("the memory is not writable")
        if self.direct is not Direct.NO and np.frombuffer(view, np.uint8).ctypes.data % PAGE:
            raise UsageError("O_DIRECT needs memory that begins at a multiple of 4096")
        self.memory, self._attached = view, True

    def measure(
        self, number: int, root: bytes, blob: bytes, offsets: npt.NDArray[np.int64], /
    ) -> None:
        self._check()
        group = self._group(number, root, blob, offsets)
        with self._lock:
            self._admit(group)

    def fetch(self, number: int, places: npt.NDArray[np.int64], /) -> None:
        self._check()
        wanted = _int64s(places)
        with self._lock:
            group = self._groups.get(number)
            if group is None or group.stage is not Stage.MEASURED or number in self._done:
                raise UsageError(f"group {number} is not a measured one")
            if len(wanted) != group.n:
                raise UsageError(f"group {number} has another number of objects")
            self._put(group, wanted)
            self._submit(group)

    def read(
        self,
        number: int,
        root: bytes,
        blob: bytes,
        offsets: npt.NDArray[np.int64],
        sizes: npt.NDArray[np.int64],
        places: npt.NDArray[np.int64],
        /,
    ) -> None:
        self._check()
        group = self._group(number, root, blob, offsets)
        if not len(known := _int64s(sizes)) == len(wanted := _int64s(places)) == group.n:
            raise UsageError("a group has as many sizes and places as names")
        group.sizes, group.expected = known.tolist(), True
        with self._lock:
            self._put(group, wanted)
            self._admit(group)

    def is_calm(self) -> bool:
        self._check()
        return self._active <= self._cpus

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
            elif group.stage is Stage.FETCHING:
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
                if group.stage is Stage.FETCHED:
                    del self._groups[number]
            if self._signalled:
                with contextlib.suppress(BlockingIOError):  # who will write has not yet done so
                    os.eventfd_read(self._event)
                    self._signalled = False
        return [group.result() for group in done.values()]

    def counters(self) -> tuple[Any, ...]:
        self._check()
        tallies = [worker.files.tally for worker in list(self._workers)]
        total = Tally()
        for field in dataclasses.fields(Tally):
            if field.name != "latency":
                setattr(total, field.name, sum(getattr(tally, field.name) for tally in tallies))
        latency = tuple(map(sum, zip(total.latency, *(t.latency for t in tallies), strict=True)))
        return (
            total.metadata_ops, total.reads, total.bytes, total.retries, total.read_seconds,
            self._peak, latency, total.direct_bytes, total.fallback_files, total.dropped_files,
            self._reading,
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
            if scratch_part_bytes != self.scratch_part:
                for worker in self._idle:
                    worker.files.drop_scratch()
            self._concurrency = concurrency
            self.scratch_part = scratch_part_bytes
            while self._call_one():
                pass
            self._arm()

    def oldest(self) -> tuple[float, bytes]:
        self._check()
        now, age, name = time.perf_counter(), 0.0, b""
        with self._lock:
            for worker in self._workers:
                run, began = worker.run, worker.began
                if run is None or run.kind is _Kind.CLOSE or run.group.discarded:
                    continue
                if began and now - began > age:
                    age, name = now - began, run.group.name(worker.file)
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
        self.memory.release()
        return 0

    # ---- the workers' calls

    def next_run(self, worker: _Worker) -> _Run | None:
        """End the worker's run and give it the next as soon as there is one; ``None``: stop."""
        with self._lock:
            if worker.run is not None:
                self._end(worker, worker.run)
            while not self.stopped or self._queue:
                if self._queue and (self.stopped or self._awake <= self._limit()):
                    worker.run = self._take()
                    if worker.run is not None:
                        self._call_one()
                        self._arm()
                        break
                else:
                    self._park(worker)
        self._tell(worker)
        return worker.run

    def leave(self) -> None:
        """A thread's last call."""
        with self._lock:
            self._alive -= 1
            self._gone.notify_all()

    def is_last_range(self, group: Group, i: int) -> bool:
        """Count a range of the file as read. True when no other is left."""
        with self._lock:
            group.parts_left[i] -= 1
            return group.parts_left[i] == 0

    def fell_back(self, group: Group, i: int) -> bool:
        """The file is read without O_DIRECT from now on. True the first time."""
        with self._lock:
            first = group.direct[i]
            group.direct[i] = False
            return first

    def keep_root(self, group: Group, fd: int) -> bool:
        """Keep the group's directory open. False when another worker was first."""
        with self._lock:
            if group.root_fd < 0:
                group.root_fd = fd
            return group.root_fd == fd

    def meet(self, group: Group, i: int, identity: tuple[int, int]) -> bool:
        """Learn which file an unmeasured one is. True the first time."""
        with self._lock:
            first = group.identities[i] == (0, 0)
            if first:
                group.identities[i] = identity
            return first

    def shed_files(self) -> bool:
        """Close the files at rest of the group that will be fetched last. True if there was one."""
        with self._lock:
            in_use = [(w.run.group, w.run.about) for w in self._workers if w.run is not None]
            for group in reversed(list(self._groups.values())):
                about = (files for of, files in in_use if of is group)
                fds = group.take_resting(set().union(*about))
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

    def _group(
        self, number: int, root: bytes, blob: bytes, offsets: npt.NDArray[np.int64]
    ) -> Group:
        ends = _int64s(offsets)
        bad = (
            not len(ends) or ends[0] < 0 or ends[-1] > len(blob) or bool((np.diff(ends) < 0).any())
        )
        if bad:
            raise UsageError("offsets do not fit the names")
        return Group(number, root, blob, ends.tolist(), self.direct is not Direct.NO)

    def _admit(self, group: Group) -> None:
        if group.number in self._groups:
            raise UsageError(f"group {group.number} is in use")
        self._submit(group)
        self._groups[group.number] = group

    def _put(self, group: Group, places: npt.NDArray[np.int64]) -> None:
        bad = self._misplaced(group, places)
        if bad is not None:
            raise UsageError(
                f"object {bad} of group {group.number} cannot be read there: it was not measured, "
                "or the place is not aligned or leaves no room"
            )
        group.places = places.tolist()
        group.stage = Stage.FETCHING

    def _misplaced(self, group: Group, places: npt.NDArray[np.int64]) -> int | None:
        """The first file that cannot be read to its place."""
        sizes = np.array(group.sizes, np.int64)
        sizes[np.array(group.codes) != 0] = -1
        direct = np.array(group.direct, bool)
        rooms = np.where(direct, (sizes + PAGE - 1) // PAGE * PAGE, sizes)
        fits = (places >= 0) & (rooms <= len(self.memory) - np.minimum(places, len(self.memory)))
        fits &= (places <= len(self.memory)) & ~(direct & (places % PAGE != 0))
        wrong = (places != SKIP) & ((sizes < 0) | ((places != DROP) & ~fits))
        return int(np.argmax(wrong)) if wrong.any() else None

    def _submit(self, group: Group) -> None:
        group.unfinished = group.n
        if group.n > 0:
            self._queue.extend(_runs(group, self._part, self.scratch_part))
        elif self._complete(group):
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

    def _take(self) -> _Run | None:
        """The next run from the queue. ``None``: its group was discarded."""
        run = self._queue[0]
        if run.group.discarded and run.kind is not _Kind.CLOSE:
            self._queue.popleft()
            return None
        count = self._run_length(run)
        run = run.split(count) if count < len(run.files) else self._queue.popleft()
        run.about = frozenset(run.files)
        run.taken = time.perf_counter()
        run.group.users += run.kind is not _Kind.CLOSE
        if run.kind is _Kind.MEASURE:
            run.keep = max(0, min(len(run.files), self._fd_budget - self._open_files))
            self._open_files += run.keep  # set right when the run ends
        elif run.kind is _Kind.READ:
            self._reading += 1
            self._peak = max(self._peak, self._reading)
        return run

    def _run_length(self, run: _Run) -> int:
        slow = self._active > self._cpus or self._typical[run.kind] > QUICK
        if slow and run.kind is not _Kind.SKIP:
            return 1  # operations block: one each
        fair = len(run.files) // (2 * self._limit())  # the end is reached together
        return max(1, min(fair, LONGEST_RUN))

    def _end(self, worker: _Worker, run: _Run) -> None:
        worker.run, group = None, run.group
        self._open_files += run.opened - run.keep - run.closed
        if run.kind is _Kind.CLOSE:
            return
        if run.ended:
            each = (time.perf_counter() - run.taken) / run.ended
            self._typical[run.kind] += (each - self._typical[run.kind]) / 8
        self._reading -= run.kind is _Kind.READ
        group.unfinished -= run.ended
        group.users -= 1
        if group.users == 0 and group.discarded:
            if group in self._unsettled:
                self._unsettled.remove(group)
                worker.notify = self._must_tell()
            self._retire(group)
        elif group.users == 0 and group.unfinished == 0:
            worker.notify = self._complete(group)

    def _complete(self, group: Group) -> bool:
        """The stage is done. True when the owner must be told."""
        group.close_root()
        measured = group.stage is Stage.MEASURING
        group.stage = Stage.MEASURED if measured else Stage.FETCHED
        self._done[group.number] = group
        return self._must_tell()

    def _must_tell(self) -> bool:
        must = not self._signalled and not self.stopped
        self._signalled = self._signalled or must
        return must

    def _retire(self, group: Group) -> None:
        """Nobody's any more: a worker closes its files."""
        if group.root_fd >= 0 or any(fd >= 0 for fd in group.fds):
            self._queue.appendleft(_Run(group, _Kind.CLOSE, deque()))
            self._call_one()

    def _retire_all(self) -> None:
        closing = [run for run in self._queue if run.kind is _Kind.CLOSE]
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
        return bool(self._queue) or self._awake > 0

    def _arm(self) -> None:
        if self._armed or self._concurrency == 1:
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
        """Ask some workers whether they are blocked, and act on it. True if ``active`` grew."""
        now = time.perf_counter()
        busy = [(w, now - began) for w in self._workers if (began := w.began)]
        if not busy:
            return False
        asked = random.sample(busy, min(SAMPLES, len(busy)))
        self._lock.release()
        try:
            states = [_is_blocked(worker.thread, age) for worker, age in asked]
        finally:
            self._lock.acquire()
        for (worker, age), is_blocked in zip(asked, states, strict=True):
            if is_blocked and age > STUCK:
                self._take_back(worker)
        blocked = sum(states)
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

    def _take_back(self, worker: _Worker) -> None:
        """What a blocked worker has not begun goes to the others."""
        run = worker.run
        if run is None or not run.files:
            return
        rest: deque[int] = deque()
        with contextlib.suppress(IndexError):  # its worker may be taking from it again
            while True:
                rest.append(run.files.popleft())
        if rest:
            self._queue.appendleft(_Run(run.group, run.kind, rest))


def _int64s(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    column = np.asarray(values)
    if column.dtype != np.int64 or column.ndim != 1:
        raise TypeError("expected a one-dimensional buffer of int64")
    return column


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
