"""Objects in memory behind a ``BulkReader``: for tests, and to ask what a storage would do.

Time is simulated: a read takes ``latency`` and its turn in ``bandwidth``, as many at once as the
concurrency allows. One thread ends operations in the order in which they are due. The slot that
one frees is taken by the next at the moment the first *was* due, however late the thread woke: so
64 in flight are 64 times as fast as one, up to the thread's own speed (some 10 µs per operation).
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import itertools
import math
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np
import numpy.typing as npt

from rayloader.config import PAGE
from rayloader.errors import OptionError, StorageError, Truncated, UsageError, storage_error
from rayloader.storage import (
    DROP,
    LATENCY_BUCKETS,
    SKIP,
    Counters,
    Keys,
    Progress,
    StorageSpec,
    latency_bucket,
)
from rayloader.storage._calls import (
    Stage,
    attachable,
    fetchable,
    require_places,
    require_unused,
    require_usable,
)

_NO_SUCH_FILE = 2


@dataclasses.dataclass(frozen=True)
class Fault:
    """What goes wrong with one object."""

    on: Literal["measure", "read"] = "read"
    errno: int = 0
    """The system's number of the error; 0: no error, only the delay."""
    delay: float = 0.0
    """Added to the latency [s]; ``math.inf``: it never returns."""
    times: int | None = None
    """How many operations it happens to, after which the object is well; ``None``: to all."""


@dataclasses.dataclass(frozen=True)
class MemorySpec(StorageSpec):
    """The recipe of a storage whose objects travel with it."""

    scheme: str = "memory"
    objects: Mapping[bytes, bytes] = dataclasses.field(default_factory=dict)
    """Full name (``root``/key) → its bytes. What changes here while the storage is open is seen by
    the operations that begin later."""
    latency: float = 0.0
    """Duration of every read [s]."""
    measure_latency: float = 0.0
    """Duration of every open and stat [s]."""
    bandwidth: float = math.inf
    """Of all reads together [bytes/s]."""
    faults: Mapping[bytes, Fault] = dataclasses.field(default_factory=dict)
    """Full name → what goes wrong with it; changes are seen like those of ``objects``."""


class MemoryLister:
    """A ``Lister`` of the objects in a ``MemorySpec``."""

    def __init__(self, spec: MemorySpec) -> None:
        self._objects = spec.objects

    def list(self, root: bytes) -> Iterator[tuple[bytes, int]]:
        """Yield (key relative to root, size [bytes])."""
        below = root.rstrip(b"/") + b"/" if root else b""
        for name, data in self._objects.items():
            if name.startswith(below):
                yield name[len(below) :], len(data)


class _Group:
    def __init__(self, number: int, root: bytes, keys: Keys) -> None:
        self.number = number
        self.keys = keys
        self.n = keys.n
        self.names = [os.path.join(root, keys.key(i)) for i in range(keys.n)]
        self.stage = Stage.MEASURING
        self.sizes = [-1] * keys.n
        self.places = [SKIP] * keys.n
        self.failures: dict[int, StorageError] = {}
        self.unfinished = 0
        self.running = 0
        self.discarded = False
        self.expected = False
        """The sizes were given; nobody has measured."""
        self.resized: dict[int, int] = {}
        """Objects that have another size than was expected, and theirs."""
        self.open: dict[int, bytes] = {}
        """Objects that have been read from: all ranges come from the same bytes."""

    def progress(self) -> Progress:
        fetched = self.stage is Stage.FETCHED
        sizes = np.array(self.sizes, np.int64)
        sizes[list(self.failures)] = -1
        if fetched:
            sizes[np.array(self.places, np.int64) == SKIP] = -1
        for i, size in self.resized.items():
            sizes[i] = size
        failures, self.failures = self.failures, {}
        return Progress(self.number, sizes, failures)


@dataclasses.dataclass(slots=True)
class _Op:
    group: _Group
    index: int
    is_read: bool
    asked: float
    """When it was put into the queue [s]; all moments are of ``time.perf_counter``."""
    offset: int = 0
    length: int = 0
    began: float = 0.0
    fault: Fault | None = None

    @property
    def name(self) -> bytes:
        return self.group.names[self.index]


def open_memory(spec: StorageSpec) -> MemoryStorage:
    """Open the storage that a ``MemorySpec`` describes.

    Raises:
        OptionError: for any other spec.
    """
    if not isinstance(spec, MemorySpec):
        raise OptionError("the scheme 'memory' needs a MemorySpec, which holds the objects")
    return MemoryStorage(spec)


class MemoryStorage:
    """A ``BulkReader`` of the objects in a ``MemorySpec``.

    Attributes:
        latency: duration of every read that begins from now on [s]; settable.
        bandwidth: of all reads together [bytes/s]; settable.
    """

    engine = "memory"

    def __init__(self, spec: MemorySpec) -> None:
        self.latency = spec.latency
        self.bandwidth = spec.bandwidth
        self._spec = spec
        self._concurrency = spec.concurrency
        self._memory: memoryview | None = None
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._pid = os.getpid()
        self._closed = False
        self._changed = threading.Condition()
        self._groups: dict[int, _Group] = {}
        self._done: dict[int, _Group] = {}
        self._queue: deque[_Op] = deque()
        self._due: list[tuple[float, int, _Op]] = []
        """Heap of the operations in flight, by the moment each ends."""
        self._order = itertools.count()
        self._pipe_free = 0.0
        """When all that was sent so far will have arrived [s]."""
        self._happened: Counter[bytes] = Counter()
        self._totals: Counter[str] = Counter()
        self._read_seconds = 0.0
        self._peak = 0
        self._latency = [0] * LATENCY_BUCKETS
        self._reading = 0
        self._thread = threading.Thread(target=self._run, name="rayloader-memory", daemon=True)
        self._thread.start()

    # ---- the protocol

    def fileno(self) -> int:
        """See ``BulkReader``."""
        self._check()
        return self._event

    def attach(self, memory: memoryview) -> None:
        """See ``BulkReader``."""
        self._check()
        self._memory = attachable(self._memory, memory)

    def measure(self, group: int, root: bytes, keys: Keys) -> None:
        """See ``BulkReader``."""
        self._check()
        require_unused(group, self._groups)
        new = _Group(group, root, keys)
        now = time.perf_counter()
        with self._changed:
            self._groups[group] = new
            self._submit(new, [_Op(new, i, False, now) for i in range(new.n)])

    def fetch(self, group: int, places: npt.NDArray[np.int64]) -> None:
        """See ``BulkReader``."""
        self._check()
        known = fetchable(group, self._groups, self._done)
        wanted = self._places(known, places)
        with self._changed:
            known.places = wanted
            known.stage = Stage.FETCHING
            self._submit(known, list(self._ranges(known)))

    def read(
        self,
        group: int,
        root: bytes,
        keys: Keys,
        sizes: npt.NDArray[np.int64],
        places: npt.NDArray[np.int64],
    ) -> None:
        """See ``BulkReader``."""
        self._check()
        require_unused(group, self._groups)
        new = _Group(group, root, keys)
        if not len(sizes) == len(places) == new.n:
            raise UsageError("a group has as many sizes and places as names")
        new.sizes = sizes.tolist()
        new.expected = True
        new.places = self._places(new, places)
        new.stage = Stage.FETCHING
        with self._changed:
            self._groups[group] = new
            self._submit(new, list(self._ranges(new)))

    def returns_at_once(self) -> bool:
        """See ``BulkReader``."""
        return False

    def discard(self, group: int) -> None:
        """See ``BulkReader``. Reads in flight still write until they are due."""
        self._check()
        with self._changed:
            gone = self._groups.pop(group, None)
            self._done.pop(group, None)
            if gone is not None:
                gone.discarded = True
                self._queue = deque(op for op in self._queue if op.group is not gone)

    def settled(self, group: int | None = None) -> bool:
        """See ``BulkReader``."""
        self._check()
        with self._changed:
            return not any(
                op.group.discarded and op.is_read and group in (None, op.group.number)
                for _, _, op in self._due
            )

    def collect(self) -> list[Progress]:
        """See ``BulkReader``."""
        self._check()
        with self._changed:
            done, self._done = self._done, {}
            for number, group in done.items():
                if group.stage is Stage.FETCHED:
                    del self._groups[number]
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._event)
        return [group.progress() for group in done.values()]

    def set_concurrency(self, concurrency: int) -> None:
        """See ``BulkReader``."""
        self._check()
        if concurrency < 1:
            raise UsageError(f"concurrency={concurrency}: must be at least 1")
        with self._changed:
            self._concurrency = concurrency
            self._changed.notify()

    def counters(self) -> Counters:
        """See ``BulkReader``."""
        self._check()
        with self._changed:
            return Counters(
                **self._totals,
                read_seconds=self._read_seconds,
                peak_in_flight=self._peak,
                in_flight=self._reading,
                latency=tuple(self._latency),
            )

    def reset_peak(self) -> None:
        """See ``BulkReader``."""
        self._check()
        with self._changed:
            self._peak = self._reading

    def oldest_read(self) -> tuple[float, str]:
        """See ``BulkReader``."""
        self._check()
        with self._changed:
            wanted = (op for _, _, op in self._due if not op.group.discarded)
            oldest = min(wanted, key=lambda op: op.began, default=None)
        if oldest is None:
            return 0.0, ""
        age = time.perf_counter() - oldest.began
        return max(age, 1e-9), os.fsdecode(oldest.group.keys.key(oldest.index))

    def close(self) -> None:
        """See ``BulkReader``. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._pid == os.getpid():
            with self._changed:
                self._changed.notify()
            self._thread.join()
        os.close(self._event)
        if self._memory is not None:
            self._memory.release()

    def unstick(self, name: bytes) -> None:
        """Let all operations in flight on the object end now, however late they are due."""
        now = time.perf_counter()
        with self._changed:
            self._due = [
                (now if op.name == name else due, order, op) for due, order, op in self._due
            ]
            heapq.heapify(self._due)
            self._changed.notify()

    # ---- in the owner's thread

    def _check(self) -> None:
        require_usable(self._closed, self._pid)

    def _places(self, group: _Group, places: npt.NDArray[np.int64]) -> list[int]:
        memory = len(self._memory) if self._memory is not None else 0
        return require_places(group, places, memory, bool(self._spec.direct))

    def _ranges(self, group: _Group) -> Iterator[_Op]:
        now = time.perf_counter()
        part = self._spec.part_bytes
        scratch = max(PAGE, min(part, self._spec.scratch_bytes // self._concurrency))
        for i, (place, size) in enumerate(zip(group.places, group.sizes, strict=True)):
            step = scratch if place == DROP else part
            least = 1 if group.expected else 0  # an object that should be empty is looked at too
            for offset in range(0, max(size, least) if place != SKIP else 0, step):
                yield _Op(group, i, True, now, offset, min(step, size - offset))

    def _submit(self, group: _Group, ops: list[_Op]) -> None:
        group.unfinished = len(ops)
        self._queue.extend(ops)
        if not ops:
            self._complete(group)
        self._changed.notify()

    # ---- in the storage's thread, and all under the lock

    def _run(self) -> None:
        while not self._closed:
            with self._changed:
                wait = self._round()
                if wait > 0 and not self._closed:
                    self._changed.wait(None if wait == math.inf else wait)
            if wait <= 0:
                time.sleep(0)  # the owner may have its turn at the lock

    def _round(self) -> float:
        """End all that is due, begin what then can; how long until the next is due [s]."""
        now = time.perf_counter()
        while self._due and self._due[0][0] <= now:
            due, _, op = heapq.heappop(self._due)
            self._end(op, due)
            self._begin_waiting(due)
        self._begin_waiting(now)
        return self._due[0][0] - time.perf_counter() if self._due else math.inf

    def _begin_waiting(self, free: float) -> None:
        """Begin what fits; ``free``: since when there has been room for it."""
        while self._queue and len(self._due) < self._concurrency:
            op = self._queue.popleft()
            op.began = max(op.asked, free)
            op.group.running += 1
            heapq.heappush(self._due, (self._ends(op), next(self._order), op))
            self._reading += op.is_read
            self._peak = max(self._peak, self._reading)

    def _ends(self, op: _Op) -> float:
        spec = self._spec
        ends = op.began + (self.latency if op.is_read else spec.measure_latency)
        fault = spec.faults.get(op.name)
        if fault is not None and fault.on == ("read" if op.is_read else "measure"):
            self._happened[op.name] += 1
            if fault.times is None or self._happened[op.name] <= fault.times:
                op.fault = fault
                ends += fault.delay
        if op.is_read and self.bandwidth < math.inf and ends < math.inf:
            ends = self._pipe_free = max(self._pipe_free, ends) + op.length / self.bandwidth
        return ends

    def _end(self, op: _Op, due: float) -> None:
        group = op.group
        group.running -= 1
        try:
            if op.fault is not None and op.fault.errno:
                raise storage_error(self._key(op), op.fault.errno)
            if op.is_read:
                self._read(op)
            else:
                self._measure(op)
        except StorageError as error:
            group.failures.setdefault(op.index, error)
        if op.is_read:
            self._reading -= 1
            self._totals["reads"] += 1
            self._read_seconds += due - op.began
            self._latency[latency_bucket(due - op.began)] += 1
        group.unfinished -= 1
        if not group.discarded and not group.unfinished:
            self._complete(group)
        elif group.discarded and not group.running:
            self._signal()

    def _measure(self, op: _Op) -> None:
        self._totals["metadata_ops"] += 2  # as a file costs: open, fstat
        data = self._object(op)
        self._totals["cache_dropped_files"] += self._spec.drop_cache
        op.group.sizes[op.index] = len(data)

    def _read(self, op: _Op) -> None:
        group, i = op.group, op.index
        if i not in group.open:
            group.open[i] = self._object(op)
        data = group.open[i]
        if group.expected and len(data) != group.sizes[i]:
            group.resized[i] = len(data)
            return
        if len(data) < group.sizes[i]:
            raise Truncated(self._key(op), "ended before its measured size")
        place = group.places[i]
        if place != DROP:
            assert self._memory is not None
            start = place + op.offset
            self._memory[start : start + op.length] = data[op.offset : op.offset + op.length]
        self._totals["bytes_transferred"] += op.length
        if self._spec.direct:
            self._totals["direct_bytes"] += op.length

    def _object(self, op: _Op) -> bytes:
        data = self._spec.objects.get(op.name)
        if data is None:
            raise storage_error(self._key(op), _NO_SUCH_FILE)
        return data

    def _key(self, op: _Op) -> str:
        return os.fsdecode(op.group.keys.key(op.index))

    def _complete(self, group: _Group) -> None:
        measured = group.stage is Stage.MEASURING
        group.stage = Stage.MEASURED if measured else Stage.FETCHED
        self._done[group.number] = group
        self._signal()

    def _signal(self) -> None:
        os.eventfd_write(self._event, 1)
