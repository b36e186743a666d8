"""The reader: a plan, a storage and an arena in; ordered batches within the bounds out.

One thread drives it and nothing in it blocks. Each batch of the plan goes through::

    MEASURING ──► MEASURED ──► FETCHING ──► COMPLETE ──► sent ──► leased ──► released
     opened and    waits for    bytes        waits for    until the trainer has
     its sizes     room in      arrive in    its turn     taken and dropped it
     asked for     the arena    the arena

A batch whose sizes are known, from the catalog or from an earlier epoch, begins as MEASURED; if
one proves wrong, it goes back to MEASURING.

Room is given strictly in the plan's order: whatever holds room can complete without any more of
it, so a full arena always drains. No ray and no torch in here.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import itertools
import os
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from rayloader import arena
from rayloader.arena import NOT_DELIVERED, Int64s, Layout, Room, Space
from rayloader.batches import Sizes, planned
from rayloader.catalog import Catalog
from rayloader.checksums import Checksums
from rayloader.config import LOOK_AHEAD_BYTES, PAGE, RANGES_BYTES, Options
from rayloader.errors import (
    BatchTooLarge,
    RayloaderError,
    SkipBudgetExceeded,
    StorageError,
    StorageStalled,
    counted,
    printable,
)
from rayloader.plan import EpochPlan, ListPlan
from rayloader.receipt import Fingerprint, Hashes, Skipped
from rayloader.storage import BulkReader, Counters, Keys, Progress
from rayloader.storage.uri import is_object, scheme_of
from rayloader.tally import Tally, TallyPage

CACHE_LINE = 64
_NOT_WANTED = -2
_WATCH_SECONDS = 0.1
_QUICK_READS = 16


@dataclasses.dataclass(frozen=True)
class Request:
    """One epoch of one rank, or its rest: the whole position, so that it may be repeated."""

    generation: int
    """Grows with every request of a trainer; what carries an older one is stale."""
    epoch: int
    rank: int
    plan: EpochPlan | ListPlan
    first_step: int = 0
    delivered: frozenset[int] = frozenset()
    """Steps after ``first_step`` that the trainer already has (``ordered=False``)."""
    skipped: int = 0
    """Samples already left out in this epoch, counted against the budget."""


class Ready(NamedTuple):
    """A batch lies in the arena."""

    step: int
    table_at: int
    """Where its table begins [bytes]."""
    length: int
    """Length of its one extent [bytes]; 0 when it lies in several."""
    samples: int
    nbytes: int
    names: Fingerprint
    skipped: list[Skipped]


class Failed(NamedTuple):
    """The epoch ends here with an error."""

    step: int
    error: RayloaderError


class Blocked(NamedTuple):
    """No batch can be placed until the trainer drops some that it was sent; bytes are wanted."""

    step: int
    needed: int


class Warned(NamedTuple):
    """Something the user should read; nothing ends."""

    text: str


class Ended(NamedTuple):
    """Every batch of the epoch has been sent."""

    steps: int


Outcome = Ready | Failed | Blocked | Warned | Ended


class Figures(NamedTuple):
    """How a reader stands, for whoever watches it from outside."""

    rank: int
    """Of the request that it serves, or served last."""
    epoch: int
    storage: str
    """The scheme of what it reads: ``file``, ``s3``, ``az``."""
    concurrency: int
    """Ceiling on reads in flight [reads]."""
    oldest_seconds: float
    """Age of the read that has been in flight for longest; 0: there is none [s]."""
    counters: Counters
    """Totals of its storage."""
    tally: Tally
    """What its trainer has counted since these were last asked for."""


_Lease = tuple[int, int]
"""(generation, where the table is): what one batch in the trainer's hands is called."""


class _Stage(enum.Enum):
    MEASURING = enum.auto()
    MEASURED = enum.auto()
    FETCHING = enum.auto()
    COMPLETE = enum.auto()


@dataclasses.dataclass(slots=True, eq=False)
class _Batch:
    step: int
    entries: Int64s
    keys: Keys
    hashes: Hashes
    names: Fingerprint
    sizes: Int64s
    layout: Layout | None
    nbytes: int
    largest: int
    """Of the sizes [bytes]."""
    expected: bool
    """The sizes are known from before; nobody has measured."""
    stage: _Stage = _Stage.MEASURED
    group: int = 0
    room: Room | None = None
    reads: int = 0
    failures: dict[int, StorageError] = dataclasses.field(default_factory=dict)


class Reader:
    """Reads the epochs of one rank, one after the other, for as long as it is asked to."""

    def __init__(self, storage: BulkReader, memory: memoryview, options: Options) -> None:
        """Read through ``storage`` into ``memory``; both stay the caller's to close."""
        self._storage = storage
        self._memory = memory
        self._options = options
        self._concurrency = options.concurrency
        self._alignment = PAGE if options.direct else CACHE_LINE
        self._space = Space(len(memory))
        self._groups = 0
        self._quarantine: list[tuple[int, Room]] = []
        """Rooms that reads of left epochs may still write to, with their groups."""
        self._leased: dict[_Lease, Room] = {}
        self._early_releases: set[_Lease] = set()
        self._tally = TallyPage(memory)
        self._served: tuple[int, int] | None = None
        """Rank and epoch of the last request."""
        self._generation = 0
        self._request: Request | None = None
        self._sizes = Sizes()
        self._checksums: Checksums | None = None
        self._watched = 0.0
        """When reads that do not return were last looked for (``time.monotonic``) [s]."""
        self._forget_epoch()
        self._statistics = _Statistics(storage, memory)

    # What the trainer says

    def hold(self, generation: int, table_at: int, length: int, samples: int) -> None:
        """The trainer still holds this batch from before this reader was started."""
        lease = (generation, table_at)
        if lease in self._early_releases:
            self._early_releases.remove(lease)
            return
        room = _room_held(self._memory, table_at, length, samples, self._alignment)
        for extent in room.extents:
            self._space.hold(extent)
        self._leased[lease] = room

    def begin(self, request: Request, catalog: Catalog) -> None:
        """Leave what was under way and read this instead."""
        self.abandon()
        self._request = request
        self._generation = request.generation
        self._served = (request.rank, request.epoch)
        self._root = catalog.root
        self._checksums = Checksums(catalog) if self._options.verify else None
        self._sizes.turn_to(catalog)
        self._planned = planned(_missing(request), catalog, self._sizes, self._alignment)
        self._skipped = request.skipped
        self._early_releases.clear()
        self._statistics.begin(request.generation)

    def abandon(self, taken: int = 0) -> None:
        """Leave the epoch: what the trainer has not taken is free again, what it holds stays.

        Args:
            taken: how many batches of this epoch, in the order sent, the trainer has taken.
        """
        self._drop_unsent()
        for table_at, (number, room) in self._sent.items():
            if number < taken:
                self._leased[self._generation, table_at] = room
            else:
                self._free(room)
        self._forget_epoch()

    def taken(self, count: int) -> None:
        """The trainer has taken so many batches of this epoch; it says so when that is bounded."""
        self._taken = count

    def released(self, generation: int, table_at: int) -> None:
        """The trainer has dropped the batch of this request whose table is here."""
        lease = (generation, table_at)
        if generation == self._generation and table_at in self._sent:
            self._free(self._sent.pop(table_at)[1])
        elif lease in self._leased:
            self._free(self._leased.pop(lease))
        else:
            self._early_releases.add(lease)

    def set_concurrency(self, concurrency: int) -> None:
        """Change the ceiling on reads in flight [reads]."""
        self._concurrency = concurrency
        self._storage.set_concurrency(concurrency)

    # What there is to do

    def advance(self) -> list[Outcome]:
        """Take what has been read, start what can be started; return what the trainer must know."""
        for progress in self._storage.collect():
            self._note(progress)
        self._reclaim()
        if self._request is None:
            return []
        outcomes = self._send()
        for step in (self._prepare, self._watch, self._finish):
            if self._request is not None:
                outcomes += step()
        self._statistics.publish(done=self._request is None)
        return outcomes

    def figures(self) -> Figures | None:
        """How it stands; ``None`` before its first request. Takes the trainer's tally."""
        if self._served is None:
            return None
        scheme = scheme_of(self._root).decode() if is_object(self._root) else "file"
        age, _ = self._storage.oldest_read()
        return Figures(
            *self._served,
            scheme,
            self._concurrency,
            age,
            self._storage.counters(),
            self._tally.take(),
        )

    @property
    def sated(self) -> bool:
        """True while as much is being read as can be of use.

        Whatever the trainer says can then wait until some of it has come.
        """
        return self._fetching > 0 and self._sated

    @property
    def settling(self) -> bool:
        """True while memory of a discarded read waits to be free."""
        return bool(self._quarantine)

    def _drop_unsent(self) -> None:
        """Stop what is being read and free what waits for its turn; what was sent stays."""
        for group, batch in self._by_group.items():
            self._storage.discard(group)
            if batch.room is not None:
                self._quarantine.append((group, batch.room))
        for batch in self._unsent:
            if batch.stage is _Stage.COMPLETE and batch.room is not None:
                self._free(batch.room)
        self._by_group.clear()
        self._unplaced.clear()
        self._unsent.clear()
        self._fetching = self._fetching_bytes = 0

    def _forget_epoch(self) -> None:
        self._request = None
        self._by_group: dict[int, _Batch] = {}
        self._unplaced: collections.deque[_Batch] = collections.deque()
        self._unsent: collections.deque[_Batch] = collections.deque()
        self._sent: dict[int, tuple[int, Room]] = {}
        self._sent_count = self._taken = 0
        self._fetching = self._fetching_bytes = 0
        self._planned_all = self._sated = False
        self._blocked = False
        self._warned = False

    def _note(self, progress: Progress) -> None:
        batch = self._by_group.get(progress.group)
        if batch is None:
            return
        if batch.stage is _Stage.MEASURING:
            batch.failures.update(progress.failures)
            batch.sizes, batch.layout = progress.sizes, None
            batch.nbytes = int(np.maximum(batch.sizes, 0).sum())
            batch.largest = int(batch.sizes.max(initial=0))
            batch.stage = _Stage.MEASURED
            self._sizes.learn(batch.entries, batch.sizes)
            return
        del self._by_group[progress.group]
        self._fetched(batch)
        if batch.expected and _other_sizes(batch, progress):
            self._measure_again(batch)
        else:
            batch.failures.update(progress.failures)

    def _fetched(self, batch: _Batch) -> None:
        batch.stage = _Stage.COMPLETE
        self._fetching -= batch.reads
        self._fetching_bytes -= batch.nbytes

    def _measure(self, batch: _Batch) -> None:
        self._groups += 1
        batch.group = self._groups
        batch.stage, batch.expected = _Stage.MEASURING, False
        batch.failures.clear()
        self._by_group[batch.group] = batch
        self._storage.measure(batch.group, self._root, batch.keys)

    def _measure_again(self, changed: _Batch) -> None:
        """Some sizes are not what they were.

        Room goes in the plan's order, so whatever has got room after this batch gives it back.
        """
        self._sizes.forget(changed.entries)
        for batch in itertools.dropwhile(lambda one: one is not changed, self._unsent):
            if batch.room is not None:
                self._take_back(batch)
        self._measure(changed)
        self._unplaced = collections.deque(b for b in self._unsent if b.room is None)

    def _take_back(self, batch: _Batch) -> None:
        """Undo that a batch was placed."""
        room, batch.room = batch.room, None
        assert room is not None
        if batch.stage is _Stage.FETCHING:
            self._storage.discard(batch.group)
            del self._by_group[batch.group]
            self._fetched(batch)
            self._quarantine.append((batch.group, room))
        else:
            self._free(room)
        if batch.expected:
            batch.stage = _Stage.MEASURED
            batch.failures.clear()
        else:
            self._measure(batch)

    def _prepare(self) -> list[Outcome]:
        """Have as much read, and as many files opened ahead, as can be of use."""
        while True:
            outcomes = self._place()
            if outcomes or not self._plan_one():
                return outcomes

    def _plan_one(self) -> bool:
        """Take the next batch of the plan, unless enough are waiting; True if there was one."""
        opened = sum(len(batch.entries) for batch in self._unplaced)
        if opened >= 2 * self._concurrency or not self._may_read_ahead():
            return False
        if self._unplaced and self._unplaced[-1].expected:  # nothing to be opened ahead
            return False
        one = next(self._planned, None)
        if one is None:
            self._planned_all = True
            return False
        batch = _Batch(*one)
        self._unplaced.append(batch)
        self._unsent.append(batch)
        if not batch.expected:
            self._measure(batch)
        return True

    def _may_read_ahead(self) -> bool:
        limit = self._options.read_ahead_batches
        if limit is None:
            return True
        # With 0, one that was asked for: the trainer says that it took a batch when it wants the
        # next.
        return len(self._unsent) + self._sent_count - self._taken < max(1, limit)

    def _enough(self) -> bool:
        """As much is being read as can be of use.

        Reads that take their time: twice what may be in flight. Reads that return at once: enough
        for the threads never to wait, and not so much that what they read has left the CPU's cache
        before the trainer takes it.
        """
        if not self._storage.returns_at_once():
            return self._fetching >= 2 * self._concurrency
        many = self._fetching >= _QUICK_READS * self._concurrency
        return many or self._fetching_bytes >= LOOK_AHEAD_BYTES

    def _place(self) -> list[Outcome]:
        """Give room to measured batches, in order, and read them."""
        self._sated = False
        while self._unplaced:
            if self._enough():
                self._sated = True
                break
            batch = self._unplaced[0]
            if batch.stage is not _Stage.MEASURED:
                break
            layout = self._layout(batch)
            if layout.length > self._space.capacity:
                if self._unsent[0] is not batch:
                    break  # those before it are delivered first
                return [self._fail(batch, self._too_large(layout.length))]
            batch.room = arena.reserve_batch(self._space, layout)
            if batch.room is None:
                return self._wait_for_room(batch, layout.length)
            self._blocked = False
            self._unplaced.popleft()
            self._fetch(batch)
        self._sated |= self._planned_all and not self._unplaced
        return []

    def _layout(self, batch: _Batch) -> Layout:
        """How it is to lie; a batch that is dropped or has already failed needs a table only."""
        if not self._options.deliver or (batch.failures and self._options.on_error == "raise"):
            return arena.lay_out(np.full(len(batch.sizes), -1, np.int64), self._alignment)
        return batch.layout or arena.lay_out(batch.sizes, self._alignment)

    def _fetch(self, batch: _Batch) -> None:
        assert batch.room is not None
        places = batch.room.places if self._options.deliver else np.full(len(batch.sizes), -1)
        if batch.failures:
            ends = self._options.on_error == "raise"
            places = np.where((batch.sizes < 0) | ends, _NOT_WANTED, places)
        places = np.ascontiguousarray(places, np.int64)
        batch.reads = self._reads(batch)
        batch.stage = _Stage.FETCHING
        self._fetching += batch.reads
        self._fetching_bytes += batch.nbytes
        if not batch.expected:
            self._storage.fetch(batch.group, places)
            return
        self._groups += 1
        batch.group = self._groups
        self._by_group[batch.group] = batch
        self._storage.read(batch.group, self._root, batch.keys, batch.sizes, places)

    def _reads(self, batch: _Batch) -> int:
        """Requests that the storage will make for a batch [reads]."""
        part = self._options.part_bytes
        if batch.largest <= part:
            return len(batch.sizes)
        return int(((np.maximum(batch.sizes, 1) + part - 1) // part).sum())

    def _wait_for_room(self, batch: _Batch, needed: int) -> list[Outcome]:
        """Say so, once, when only the trainer can make room."""
        if self._fetching or self._blocked or self._unsent[0] is not batch:
            return []
        self._blocked = True
        return [Blocked(batch.step, needed)]

    def _send(self) -> list[Outcome]:
        """Hand over complete batches: in order, or as they come."""
        outcomes: list[Outcome] = []
        for batch in list(self._unsent):
            if batch.stage is _Stage.COMPLETE:
                self._unsent.remove(batch)
                outcomes.append(self._deliver(batch))
                if self._request is None:
                    return outcomes
            elif self._options.ordered:
                break
        return outcomes

    def _finish(self) -> list[Outcome]:
        if self._unsent or not self._planned_all:
            return []
        assert self._request is not None
        steps, self._request = self._request.plan.steps, None
        return [Ended(steps)]

    def _deliver(self, batch: _Batch) -> Outcome:
        skipped: list[Skipped] = []
        self._verify(batch)
        if batch.failures:
            first = batch.failures[min(batch.failures)]
            if self._options.on_error == "raise":
                return self._fail(batch, first)
            self._skipped += len(batch.failures)
            if self._skipped > self._skip_budget():
                return self._fail(batch, self._over_budget(first))
            skipped = [Skipped(e.key, e.cause) for _, e in sorted(batch.failures.items())]
            self._leave_out(batch)
        room, sizes = batch.room, batch.sizes
        assert room is not None
        places = room.places if self._options.deliver else _nowhere(len(sizes))
        arena.write_table(self._memory, room, places, sizes, batch.entries)
        self._sent[room.table_at] = (self._sent_count, room)
        self._sent_count += 1
        return Ready(
            batch.step,
            room.table_at,
            room.extents[0].length if len(room.extents) == 1 else 0,
            len(sizes),
            batch.nbytes,
            batch.names,
            skipped,
        )

    def _verify(self, batch: _Batch) -> None:
        """Let samples fail that are not what the catalog says."""
        if self._checksums is None or batch.room is None:
            return
        places, sizes = batch.room.places.tolist(), batch.sizes.tolist()
        for i, expected in enumerate(self._checksums.of(batch.entries)):
            if i in batch.failures or sizes[i] < 0:
                continue
            data = self._memory[places[i] : places[i] + sizes[i]]
            failure = self._checksums.failure(os.fsdecode(batch.keys.key(i)), data, expected)
            if failure is not None:
                batch.failures[i] = failure

    def _leave_out(self, batch: _Batch) -> None:
        """Shorten a batch by its samples that failed."""
        assert batch.room is not None
        keep = np.ones(len(batch.entries), bool)
        keep[list(batch.failures)] = False
        room = self._give_back(batch.room, ~keep)
        batch.room = room._replace(places=room.places[keep])
        batch.sizes, batch.entries = batch.sizes[keep], batch.entries[keep]
        batch.names = Fingerprint.of(batch.hashes[keep])
        batch.nbytes = int(batch.sizes.sum())

    def _give_back(self, room: Room, failed: np.ndarray) -> Room:
        """Free the extents of samples that failed after they had got room of their own."""
        if len(room.extents) == 1:
            return room
        lost = set(room.places[failed].tolist()) - {room.table_at}
        for extent in room.extents:
            if extent.start in lost:
                self._space.release(extent)
        return room._replace(extents=[e for e in room.extents if e.start not in lost])

    def _fail(self, batch: _Batch, error: RayloaderError) -> Failed:
        assert self._request is not None
        error.add_note(
            f"rank {self._request.rank}, epoch {self._request.epoch}, batch {batch.step}"
        )
        if batch.room is not None and batch not in self._unsent:
            self._free(batch.room)
        self._drop_unsent()
        self._request = None
        return Failed(batch.step, error)

    def _too_large(self, needed: int) -> BatchTooLarge:
        options, given = self._options, self._space.capacity
        in_transit = options.ranges_bytes if is_object(self._root) else 0
        if given + arena.HEADER_BYTES < (options.memory_bytes - in_transit) // PAGE * PAGE:
            limit, cure = "the memory cgroup", f"let it have {needed - given:,} more"
        else:
            least = needed + arena.HEADER_BYTES
            if in_transit:
                least = min(least + RANGES_BYTES, -(-least * 8 // 7))
            limit = f"memory_bytes={options.memory_bytes:,}"
            cure = f"set memory_bytes to at least {least:,}"
        return BatchTooLarge(
            f"a batch needs {needed:,} bytes and {limit} gives {given:,}: {cure}, or a smaller "
            f"batch_size, or deliver=False"
        )

    def _skip_budget(self) -> int:
        assert self._request is not None
        share = int(self._options.skip_budget_share * self._request.plan.samples)
        return min(self._options.skip_budget_files, max(1, share))

    def _over_budget(self, last: StorageError) -> SkipBudgetExceeded:
        error = SkipBudgetExceeded(
            f"{counted(self._skipped, 'sample')} could not be read, {self._skip_budget()} may be "
            f"skipped (skip_budget_files, skip_budget_share); the last: {last}"
        )
        error.__cause__ = last
        return error

    def _watch(self) -> list[Outcome]:
        """Warn of a read that does not return, and give up on it in the end."""
        now = time.monotonic()
        if now - self._watched < _WATCH_SECONDS:
            return []
        self._watched = now
        age, key = self._storage.oldest_read()
        if age > self._options.read_timeout and self._unsent:
            stalled = StorageStalled(key, f"no answer from the storage for {age:.0f} s")
            return [self._fail(self._unsent[0], stalled)]
        if age > self._options.stall_seconds and not self._warned:
            self._warned = True
            return [
                Warned(
                    f"{printable(key)}: no answer from the storage for {age:.0f} s, still waiting"
                )
            ]
        return []

    def _reclaim(self) -> None:
        quarantine, self._quarantine = self._quarantine, []
        for group, room in quarantine:
            if self._storage.settled(group):
                self._free(room)
            else:
                self._quarantine.append((group, room))

    def _free(self, room: Room) -> None:
        for extent in room.extents:
            self._space.release(extent)
        self._blocked = False


def _other_sizes(batch: _Batch, progress: Progress) -> bool:
    """Something could be read but for its size."""
    if not progress.failures and progress.sizes.tobytes() == batch.sizes.tobytes():
        return False  # nearly always, and in a tenth of the time
    read = progress.sizes >= 0
    return bool((progress.sizes[read] != batch.sizes[read]).any())


class _Statistics:
    """Writes what the storage counted for the running epoch into the arena's first page."""

    INTERVAL = 0.05
    """At most this often while an epoch runs [s]."""

    def __init__(self, storage: BulkReader, memory: memoryview) -> None:
        self._storage = storage
        self._page = np.frombuffer(memory, np.int64, arena.HEADER_BYTES // 8)
        self._generation = 0
        self._start = self._last = Counters()
        self._before = Counters()
        self._cpu_start = time.process_time_ns()
        self._published = 0.0

    def begin(self, generation: int) -> None:
        self._generation = generation
        self._before = self._last
        self._start = self._storage.counters()
        self._storage.reset_peak()
        self._cpu_start = time.process_time_ns()
        self.publish(done=True)

    def publish(self, *, done: bool = False) -> None:
        now = time.monotonic()
        if not done and now - self._published < self.INTERVAL:
            return
        self._published = now
        self._last = self._storage.counters()
        cpu = time.process_time_ns() - self._cpu_start
        self._page[:_COUNTS] = ReaderCounts.between(
            self._generation, self._before, self._start, self._last, cpu
        )


_HEAD = 14
_COUNTS = _HEAD + 128


class ReaderCounts(NamedTuple):
    """What the reader counted in one epoch, as it lies in the arena's first page (int64 each)."""

    generation: int
    metadata_ops: int
    reads: int
    bytes_transferred: int
    retries: int
    read_ns: int
    peak_in_flight: int
    direct_bytes: int
    direct_fallback_files: int
    cache_dropped_files: int
    cpu_ns: int
    bytes_before_clock: int
    metadata_ops_before_clock: int
    throttled: int
    latency: Int64s

    @staticmethod
    def between(
        generation: int, before: Counters, start: Counters, now: Counters, cpu_ns: int
    ) -> Int64s:
        """The counts of an epoch that began at ``start``, as int64 [142].

        Args:
            generation: of the epoch's request.
            before: the counters when the epoch before was last looked at.
            start: the counters at the epoch's begin.
            now: the counters now.
            cpu_ns: CPU time of the process since the epoch's begin [ns].
        """
        differences = [
            getattr(now, name) - getattr(start, name)
            for name in ("metadata_ops", "reads", "bytes_transferred", "retries")
        ]
        read_ns = int((now.read_seconds - start.read_seconds) * 1e9)
        direct = [
            getattr(now, name) - getattr(start, name)
            for name in ("direct_bytes", "direct_fallback_files", "cache_dropped_files")
        ]
        earlier = [
            start.bytes_transferred - before.bytes_transferred,
            start.metadata_ops - before.metadata_ops,
        ]
        throttled = now.throttled - start.throttled
        head = [
            generation, *differences, read_ns, now.peak_in_flight, *direct, cpu_ns, *earlier,
            throttled,
        ]  # fmt: skip
        latency = np.subtract(now.latency, start.latency, dtype=np.int64)
        return np.concatenate([np.array(head, np.int64), latency])

    @classmethod
    def of(cls, page: Int64s) -> ReaderCounts:
        """The counts in an arena's first page."""
        head = dict(zip(cls._fields, page[:_HEAD].tolist(), strict=False))
        return cls(**head, latency=page[_HEAD:_COUNTS].copy())


def _missing(request: Request) -> Iterator[tuple[int, Int64s]]:
    """The steps that the trainer does not have yet, and their entries."""
    steps = range(request.first_step, request.plan.steps)
    batches = zip(steps, request.plan.batches(steps.start, steps.stop), strict=True)
    return (batch for batch in batches if batch[0] not in request.delivered)


def _nowhere(samples: int) -> Int64s:
    return np.full(samples, NOT_DELIVERED, np.int64)


def _room_held(
    memory: memoryview, table_at: int, length: int, samples: int, alignment: int
) -> Room:
    """The room of a batch whose table an earlier reader wrote."""
    table = arena.read_table(memory, table_at, samples)
    if length:
        extents = [arena.Extent(table_at, length)]
    else:
        extents = arena.pieces(table_at, table[:, 0], table[:, 1], alignment)
    return Room(extents, table_at, table[:, 0])
