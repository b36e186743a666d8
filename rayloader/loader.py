"""What one rank holds: it opens, restarts and closes the reader. Recovery lives here, once.

::

    NEW ──open()──► OPEN ──close()──► CLOSED

Every epoch is a :class:`Request` that states its whole position, so a reader needs no memory:
when one dies, the next one is given the same arena, told what is still held, and asked for the
rest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from rayloader import cluster
from rayloader.catalog import Catalog
from rayloader.channel import Delivery, ReaderGone
from rayloader.config import Options
from rayloader.errors import CatalogMismatch, OptionError, ReaderLost, StateMismatch, UsageError
from rayloader.launch import Launch
from rayloader.plan import EpochPlan, ListPlan, Shard
from rayloader.reader import Ended, ReaderCounts, Request, Warned
from rayloader.receipt import Fingerprint, Receipt, latency_quantile
from rayloader.remote import RemoteReader

log = logging.getLogger("rayloader")

STATE_VERSION = 1
_LISTING_SECONDS = 24 * 3600.0
"""How long ranks wait for the one that lists for them [s]; its death ends their wait."""


class _State(enum.Enum):
    NEW = enum.auto()
    OPEN = enum.auto()
    CLOSED = enum.auto()


@dataclasses.dataclass(frozen=True)
class Upcoming:
    """What the next iterator will read."""

    epoch: int = 0
    files: Catalog | None = None
    """The caller's own list, or ``None``: the catalog, sharded by the plan."""
    fixed_steps: int | None = None
    start: int = 0
    """Global position where this cut of the epoch begins [samples]."""
    step: int = 0
    """First step of this cut that has not been delivered."""
    delivered: frozenset[int] = frozenset()
    """Steps after it that have (``ordered=False``)."""
    list_digest: str | None = None
    """Set while a loaded state waits for the list it was saved with."""


class Loader:
    """The reader of one rank, seen from its trainer."""

    def __init__(self, source: Any, options: Options, launch: Launch) -> None:
        """Read ``source`` as rank ``launch.rank`` of ``launch.world_size``; acts on ``open``."""
        self.source = source
        self.options = options
        self.launch = launch
        self.shard = Shard(launch.rank, launch.world_size)
        self.receipt_of_last: Receipt = Receipt()
        self._state = _State.NEW
        self._upcoming = Upcoming()
        self._run: Run | None = None
        self._left: Upcoming | None = None
        """Where an unfinished iteration was left; iterating again begins the epoch anew."""
        self._catalog: Catalog | None = None
        self._remote: RemoteReader | None = None
        self._generation = 0
        self._ended_at: float | None = None
        self._listing_ops = 0
        """Made to list the source, and not yet on a receipt [operations]."""
        self._pid = os.getpid()
        self._lock = threading.RLock()

    # Life

    def open(self) -> None:
        """List the source, join Ray and start the reader. Idempotent.

        Raises:
            CatalogError: the source cannot be listed.
            ClusterError: Ray cannot be joined or started.
        """
        self._require_this_process()
        if self._state is _State.CLOSED:
            raise UsageError("this data set is closed; make a new one")
        with self._lock:
            if self._state is _State.NEW:
                remote = RemoteReader(self.options, self.launch, self.catalog)
                try:
                    remote.start()
                    self._require_same_catalog()
                except BaseException:
                    remote.close()
                    raise
                self._remote = remote
                self._state = _State.OPEN

    def close(self) -> None:
        """End the reader. Batches that are held stay intact. Idempotent."""
        with self._lock:
            self._state = _State.CLOSED
            if self._run is not None:
                self._leave(self._run)
            if self._remote is not None and os.getpid() == self._pid:
                self._remote.close()
            self._remote = None

    # What is read

    @property
    def catalog(self) -> Catalog | None:
        """What exists; ``None`` when every epoch brings its own list."""
        if self._catalog is None and self.source is not None:
            self._catalog = self._list()
        return self._catalog

    def set_epoch(
        self, epoch: int, files: Sequence[Any] | None = None, steps: int | None = None
    ) -> None:
        """Say which epoch the next iterator reads.

        The epoch of a loaded state keeps its position; any other begins at its start.

        Args:
            epoch: number of the epoch, >= 0; it decides the order.
            files: this rank's own list, in order; it is not sharded or shuffled.
            steps: with ``files``, the number of batches: a longer list is cut, a shorter one is
                an error, or padded under ``uneven="pad"``.

        Raises:
            OptionError: ``steps`` without ``files``, or a list too short.
            StateMismatch: the list is not the one that the loaded state was saved with.
        """
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise OptionError(f"epoch={epoch!r}: must be a whole number >= 0")
        if files is None and steps is not None:
            raise OptionError(
                f"steps={steps} goes with files=[...]: a catalog decides its own steps"
            )
        listed = None if files is None else Catalog.of_files(files)
        upcoming = Upcoming(epoch, listed, steps)
        loaded = self._upcoming
        if epoch == loaded.epoch and (loaded.step or loaded.start or loaded.delivered):
            self._require_same_list(loaded, listed)
            upcoming = dataclasses.replace(loaded, files=listed, fixed_steps=steps)
        self._require_inside(upcoming)
        self._upcoming, self._left = upcoming, None

    @property
    def steps(self) -> int:
        """Batches that the next iterator yields."""
        return (
            self._plan(self._upcoming).steps - self._upcoming.step - len(self._upcoming.delivered)
        )

    @property
    def total_steps(self) -> int:
        """Batches of the whole cut that the next iterator reads from."""
        return self._plan(self._upcoming).steps

    def set_concurrency(self, concurrency: int) -> None:
        """Change the ceiling on reads in flight, now and for readers started later [reads]."""
        self.options = self.options.replace(concurrency=concurrency)
        if self._remote is not None:
            self._remote.set_concurrency(self.options)

    def epoch(self) -> Iterator[tuple[Run, Delivery]]:
        """Yield the upcoming epoch's batches; nothing is sent before the first is asked for."""
        self.open()
        run = self._begin()
        try:
            while (delivery := self._receive(run)) is not None:
                run.delivered(delivery)
                yield run, delivery
                del delivery
        except GeneratorExit:
            self._leave(run)
            raise
        self._finish(run)
        self._upcoming, self._left = Upcoming(run.epoch + 1), None

    @property
    def receipt(self) -> Receipt:
        """What the running epoch has read so far, or the last one did."""
        run = self._run
        if run is not None:
            self._update(run)
            return run.receipt
        return self.receipt_of_last

    # Position

    def state(self) -> dict[str, Any]:
        """The position, as plain values; any rank's resumes all ranks when saved at one step."""
        at = self._run.rest() if self._run is not None else self._left or self._upcoming
        if at.list_digest is not None and at.files is None:  # loaded, and its list not yet given
            digest, position = at.list_digest, at.step * self.options.batch_size
        else:
            listed = self.catalog if at.files is None else at.files
            digest = listed.digest if listed is not None else ""
            position = self._plan(at).position(at.step)
        return {
            "version": STATE_VERSION,
            "epoch": at.epoch,
            "seed": self.options.seed,
            "shuffle": self.options.shuffle,
            "catalog": digest,
            "explicit": at.files is not None or at.list_digest is not None,
            "step": at.step,
            "start": at.start,
            "position": position,
            "delivered": sorted(at.delivered),
            "world_size": self.shard.world_size,
            "batch_size": self.options.batch_size,
            "uneven": self.options.uneven,
            "drop_last": self.options.drop_last,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a saved position, with this or another number of ranks.

        Raises:
            StateMismatch: it belongs to another catalog, seed, order or version, and says which;
                or it is no state at all. The position stays what it was.
        """
        _require_known_state(state)
        self._require_same("shuffle", state, self.options.shuffle)
        if state["shuffle"]:
            self._require_same("seed", state, self.options.seed)
        same_cut = all(
            state[name] == value
            for name, value in {
                "world_size": self.shard.world_size,
                "batch_size": self.options.batch_size,
                "uneven": self.options.uneven,
                "drop_last": self.options.drop_last,
            }.items()
        )
        if state["explicit"]:
            upcoming = Upcoming(state["epoch"], step=state["step"], list_digest=state["catalog"])
        else:
            catalog = self.catalog
            self._require_same("catalog", state, catalog.digest if catalog is not None else "")
            upcoming = Upcoming(state["epoch"], start=state["start"], step=state["step"])
        delivered = frozenset(state["delivered"])
        if same_cut:
            upcoming = dataclasses.replace(upcoming, delivered=delivered)
        elif delivered or state["explicit"]:
            self._require_same("world_size", state, self.shard.world_size)
            self._require_same("batch_size", state, self.options.batch_size)
            if delivered:  # which steps they are depends on the whole cut
                self._require_same("uneven", state, self.options.uneven)
                self._require_same("drop_last", state, self.options.drop_last)
        else:
            upcoming = Upcoming(state["epoch"], start=state["position"])
        if upcoming.list_digest is None:
            self._require_inside(upcoming)
        self._run = None
        self._upcoming, self._left = upcoming, None

    # Inside

    def _list(self) -> Catalog:
        """List the source; of the ranks on a node one does, and all share what it found."""

        def listed() -> Catalog:
            catalog = Catalog.from_source(self.source)
            self._listing_ops = catalog.metadata_ops
            return catalog

        name = _shared_name(self.source)
        if name is None or self.launch.run_id is None or self.launch.local_world_size == 1:
            return listed()
        guardian = cluster.guardian(self.launch.run_id, timeout=self.options.start_timeout)
        fd = guardian.shared(name, lambda: listed().to_fd(), _LISTING_SECONDS)
        try:
            return Catalog.from_fd(fd)
        finally:
            os.close(fd)

    def _require_same_catalog(self) -> None:
        """All ranks that joined the same Ray must see the same names."""
        catalog, run_id = self.catalog, self.launch.run_id
        if catalog is None or run_id is None or self.shard.world_size == 1:
            return
        name = _shared_name(self.source) or f"catalog of {self.shard.world_size} ranks"
        first = cluster.first_said(f"{run_id}/{name}", catalog.digest)
        if first != catalog.digest:
            raise CatalogMismatch(
                f"rank {self.shard.rank} sees another catalog (digest {catalog.digest}, "
                f"{len(catalog):,} entries) than the first rank of this run (digest {first}): "
                f"every rank must list the same names"
            )

    def _plan(self, upcoming: Upcoming) -> EpochPlan | ListPlan:
        options = self.options
        if upcoming.files is not None:
            return ListPlan(
                len(upcoming.files),
                options.batch_size,
                upcoming.fixed_steps,
                options.uneven,
                options.drop_last,
            )
        catalog = self.catalog
        if catalog is None:
            raise UsageError("no source and no list: call set_epoch(epoch, files=[...]) first")
        return EpochPlan(
            len(catalog),
            self.shard,
            options.batch_size,
            upcoming.epoch,
            options.seed,
            options.shuffle,
            options.uneven,
            options.drop_last,
            upcoming.start,
        )

    def _begin(self) -> Run:
        """Begin the upcoming epoch: the clock starts here."""
        upcoming = self._upcoming
        if upcoming.list_digest is not None and upcoming.files is None:
            raise StateMismatch(
                f"the loaded state was saved with an explicit list for epoch {upcoming.epoch}: "
                f"call set_epoch({upcoming.epoch}, files=[...]) with it first"
            )
        run = Run(upcoming, self._plan(upcoming), self.catalog, self.shard, self.options)
        run.gap_from = self._ended_at
        run.listing_ops, self._listing_ops = self._listing_ops, 0
        # What an iterator began is not begun again by the next one.
        self._upcoming = Upcoming(upcoming.epoch, upcoming.files, upcoming.fixed_steps)
        self._run, self._left = run, None
        try:
            self._request(run)
        except ReaderGone as gone:  # it died between two epochs
            self._restart(run, gone)
        return run

    def _request(self, run: Run) -> None:
        self._generation += 1
        run.generation = self._generation
        assert self._remote is not None
        self._remote.begin(run.request(self._generation, self.shard.rank), run.upcoming.files)

    def _receive(self, run: Run) -> Delivery | None:
        """The next batch, or ``None`` at the end; restarts the reader where that is needed."""
        called = time.perf_counter()
        try:
            while True:
                remote = self._require_current(run)
                try:
                    outcome = remote.receive()
                except ReaderGone as gone:
                    self._restart(run, gone)
                    continue
                if isinstance(outcome, Warned):
                    log.warning("%s (rank %d, epoch %d)", outcome.text, self.shard.rank, run.epoch)
                elif isinstance(outcome, Ended):
                    return None
                else:
                    run.restarts_in_a_row = 0
                    return outcome
        except BaseException:  # a failure, or Ctrl-C
            self._leave(run)
            raise
        finally:
            run.waited(time.perf_counter() - called)

    def _require_current(self, run: Run) -> RemoteReader:
        if run is not self._run or self._remote is None:
            raise UsageError(
                "this iterator has ended: the data set was closed, or a newer iterator began"
            )
        self._require_this_process()
        return self._remote

    def _restart(self, run: Run, gone: ReaderGone) -> None:
        """Start another reader where the last one left off."""
        assert self._remote is not None
        run.restarts_in_a_row += 1
        if run.restarts_in_a_row > self.options.max_restarts:
            self._leave(run)
            raise ReaderLost(
                f"the reader of rank {self.shard.rank} died {run.restarts_in_a_row} times without "
                f"delivering a batch (max_restarts={self.options.max_restarts}): {gone}"
            ) from gone
        log.warning(
            "reader of rank %d is gone (%s); starting another",
            self.shard.rank,
            str(gone).splitlines()[0],
        )
        run.reader_gone(self._remote.counts())
        try:
            self._remote.restart()
            self._request(run)
        except ReaderGone as again:
            self._restart(run, again)

    def _leave(self, run: Run) -> None:
        """The epoch is left unfinished: its position stays known, its read-ahead is dropped."""
        if run is not self._run:
            return
        self._finish(run)
        self._left = run.rest()
        if self._remote is not None and os.getpid() == self._pid:
            self._generation += 1
            with contextlib.suppress(ReaderGone):
                self._remote.abandon(self._generation)

    def _finish(self, run: Run) -> None:
        if run is not self._run:
            return
        run.ended_at = self._ended_at = time.perf_counter()
        self._update(run)
        self.receipt_of_last = run.receipt
        self._run = None

    def _update(self, run: Run) -> None:
        if self._remote is not None:
            run.update(self._remote.counts(), self._remote)

    def _require_same(self, name: str, state: dict[str, Any], mine: Any) -> None:
        if state[name] != mine:
            raise StateMismatch(
                f"the state was saved with {name}={state[name]!r} and this data set has {mine!r}"
            )

    def _require_inside(self, upcoming: Upcoming) -> None:
        """A position must lie in its epoch."""
        try:
            steps = self._plan(upcoming).steps
        except OptionError as outside:
            if upcoming.start:
                raise StateMismatch(f"the state does not fit this data set: {outside}") from outside
            raise
        last = max({upcoming.step, *(step + 1 for step in upcoming.delivered)})
        if last > steps:
            raise StateMismatch(
                f"the state is at step {last}, and epoch {upcoming.epoch} has only {steps} here"
            )

    def _require_same_list(self, loaded: Upcoming, listed: Catalog | None) -> None:
        if loaded.list_digest is None:
            return
        if listed is None or listed.digest != loaded.list_digest:
            found = "no list" if listed is None else f"a list with digest {listed.digest}"
            raise StateMismatch(
                f"the state of epoch {loaded.epoch} was saved with the list of digest "
                f"{loaded.list_digest}, and this is {found}"
            )

    def _require_this_process(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError(
                "this data set was opened in another process; a forked child cannot read from it"
            )


class Run:
    """One epoch under way: what has been delivered, and its receipt."""

    def __init__(
        self,
        upcoming: Upcoming,
        plan: EpochPlan | ListPlan,
        catalog: Catalog | None,
        shard: Shard,
        options: Options,
    ) -> None:
        """Begin at ``upcoming``; the clock starts now."""
        self.upcoming = upcoming
        self.epoch = upcoming.epoch
        self.plan = plan
        self.names = upcoming.files if upcoming.files is not None else catalog
        self.generation = 0
        self.restarts_in_a_row = 0
        self.started_at = time.perf_counter()
        self.ended_at: float | None = None
        self.gap_from: float | None = None
        self.listing_ops = 0
        self._ordered = options.ordered
        self._step = upcoming.step
        self._delivered = set(upcoming.delivered)
        self._fingerprint = Fingerprint()
        self._earlier: list[ReaderCounts] = []
        self.receipt = Receipt(
            epoch=self.epoch,
            rank=shard.rank,
            world_size=shard.world_size,
            steps_expected=plan.steps - upcoming.step - len(upcoming.delivered),
            concurrency=options.concurrency,
        )

    def request(self, generation: int, rank: int) -> Request:
        """Ask for everything that has not been delivered."""
        skipped = len(self.receipt.skipped)
        return Request(
            generation, self.epoch, rank, self.plan, self._step, frozenset(self._delivered), skipped
        )

    def rest(self) -> Upcoming:
        """The position now."""
        return dataclasses.replace(
            self.upcoming, step=self._step, delivered=frozenset(self._delivered)
        )

    def delivered(self, delivery: Delivery) -> None:
        """Count a batch; the position moves before the batch is yielded."""
        receipt = self.receipt
        self._delivered.add(delivery.step)
        while self._step in self._delivered:
            self._delivered.remove(self._step)
            self._step += 1
        if receipt.steps == 0:
            now = time.perf_counter()
            receipt.first_batch_seconds = now - self.started_at
            receipt.gap_seconds = now - self.gap_from if self.gap_from is not None else 0.0
        receipt.steps += 1
        receipt.files += len(delivery.table)
        receipt.bytes += delivery.nbytes
        receipt.private_copies += delivery.private and len(delivery.data) > 0
        receipt.skipped += delivery.skipped
        self._fingerprint = self._fingerprint.then(delivery.names)

    def waited(self, seconds: float) -> None:
        """The trainer spent this long in ``next()`` [s]."""
        self.receipt.stall_seconds += seconds

    def reader_gone(self, counts: ReaderCounts | None) -> None:
        """Keep what a reader had counted when it died."""
        self.receipt.restarts += 1
        if counts is not None and counts.generation == self.generation:
            self._earlier.append(counts)

    def update(self, counts: ReaderCounts | None, remote: RemoteReader) -> None:
        """Bring the receipt up to now."""
        receipt = self.receipt
        ended = self.ended_at if self.ended_at is not None else time.perf_counter()
        receipt.seconds = ended - self.started_at
        receipt.read_hash = f"{self._fingerprint.content:016x}"
        receipt.order_hash = f"{self._fingerprint.order:016x}"
        receipt.reader_pid = remote.welcome["pid"]
        receipt.engine = remote.welcome["engine"]
        receipt.affinity = remote.welcome["affinity"]
        receipt.channel = remote.name
        receipt.memory_bytes = remote.memory_bytes
        known = [*self._earlier, *([counts] if counts is not None else [])]
        for name in (
            "metadata_ops",
            "reads",
            "bytes_transferred",
            "retries",
            "direct_bytes",
            "direct_fallback_files",
            "cache_dropped_files",
            "bytes_before_clock",
            "metadata_ops_before_clock",
        ):
            setattr(receipt, name, sum(getattr(count, name) for count in known))
        receipt.metadata_ops_before_clock += self.listing_ops
        receipt.cpu_reader = sum(count.cpu_ns for count in known) / 1e9
        receipt.peak_in_flight = max((count.peak_in_flight for count in known), default=0)
        if receipt.seconds > 0:
            receipt.mean_in_flight = sum(count.read_ns for count in known) / 1e9 / receipt.seconds
        latency = np.sum([count.latency for count in known], axis=0, initial=0)
        receipt.latency_p50 = latency_quantile(latency, 0.50) if known else 0.0
        receipt.latency_p99 = latency_quantile(latency, 0.99) if known else 0.0


def _shared_name(source: Any) -> str | None:
    """What the ranks of a node call the same listing; ``None`` for what needs no sharing."""
    if not isinstance(source, str | bytes | os.PathLike):
        return None
    return "catalog " + os.fsdecode(os.path.abspath(source))


def _require_known_state(state: dict[str, Any]) -> None:
    """A state must be one of ours, whole and of this version."""
    if not isinstance(state, dict) or set(state) != set(_STATE):
        odd = set(state) ^ set(_STATE) if isinstance(state, dict) else {type(state).__name__}
        raise StateMismatch(f"not a state of rayloader: {', '.join(sorted(map(str, odd)))}")
    if state["version"] != STATE_VERSION:
        raise StateMismatch(
            f"state version {state['version']!r}: this rayloader knows {STATE_VERSION}"
        )
    wrong = [name for name, fits in _STATE.items() if not fits(state[name])]
    if wrong:
        found = ", ".join(f"{name}={state[name]!r:.40}" for name in wrong)
        raise StateMismatch(f"not a state of rayloader: {found}")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_whole(value) and value >= 0


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


_STATE: dict[str, Callable[[Any], bool]] = {
    "version": _is_whole,
    "epoch": _is_count,
    "seed": _is_whole,
    "shuffle": _is_bool,
    "catalog": _is_text,
    "explicit": _is_bool,
    "step": _is_count,
    "start": _is_count,
    "position": _is_count,
    "delivered": _are_counts,
    "world_size": _is_count,
    "batch_size": _is_count,
    "uneven": _is_text,
    "drop_last": _is_bool,
}
"""What a state consists of, and what each part must be."""
