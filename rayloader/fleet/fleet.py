"""What a user holds: a Fleet of ranks that can be changed while they read."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from rayloader.catalog import Catalog, Source
from rayloader.config import Options
from rayloader.errors import EmptyCatalog, OptionError, UsageError, counted
from rayloader.experiment.grid import Grid
from rayloader.experiment.live import FleetWatch, SweepWatch, console_of_progress
from rayloader.experiment.recipe import make_directory
from rayloader.experiment.sweep import (
    Cache,
    Records,
    SweepPlan,
    save_table,
    session,
    subject,
    table_of,
)
from rayloader.fleet.crew import Crew
from rayloader.fleet.epoch import Epoch, Outcome, Running, require_ordered
from rayloader.fleet.report import EpochReport
from rayloader.fleet.sweep import Watch, run_trials
from rayloader.storage.access import Access


class Fleet:
    """Several ranks that read one source as a training job would, led from here.

    ::

        with rayloader.Fleet("data/train", ranks=2, batch_size=24) as fleet:
            print(fleet.run_epoch())         # GB/s, samples/s, latency, stalls, per rank and total
            fleet.scale(ranks=8)             # six more start; the two go on as they are
            fleet.concurrency = 16           # now
            running = fleet.start_epoch()    # in the background ...
            fleet.scale(ranks=4)             # ... and what it has left is dealt out anew
            print(running.report())

    Every rank is an actor with a :class:`~rayloader.RankDataset`, on the nodes of the Ray that is
    joined in turn. Every sample of an epoch is read once, whatever the number of ranks and however
    often it changes (those that divide by no step are read by rank 0; with ``uneven="pad"`` or
    ``drop_last=True`` the plan is that of training). A consumer that dies is replaced, and another
    goes on from where it is known to have been; the report says so.

    Args:
        source: as ``RankDataset`` takes it; listed once, here.
        ranks: how many, > 0.
        compute_seconds: the training step that is imitated, per batch, >= 0 [s]; may be set.
        touch: look at every byte that is delivered; may be set.
        progress: show it while an epoch runs; ``None``: on a terminal and in a notebook.
        options: of every rank; see :class:`~rayloader.Options`.
        **more: single options by name; they win over ``options``.

    Raises:
        OptionError: an unknown option or a bad value.
    """

    # A misspelt name that is set is an AttributeError.
    __slots__ = (
        "__weakref__", "_closed", "_compute_seconds", "_crew", "_epoch", "_lock", "_options",
        "_pid", "_progress", "_ranks", "_running", "_source", "_touch",
    )  # fmt: skip

    def __init__(
        self,
        source: Source,
        ranks: int = 1,
        *,
        compute_seconds: float = 0.0,
        touch: bool = False,
        progress: bool | None = None,
        options: Options | None = None,
        **more: Any,
    ) -> None:
        self._options = Options.of({**(options.asdict() if options is not None else {}), **more})
        self._source = source
        self._ranks = _whole("ranks", ranks)
        self._progress = progress
        self._compute_seconds = 0.0
        self._touch = False
        self.compute_seconds = compute_seconds
        self.touch = touch
        self._epoch = 0
        self._crew: Crew | None = None
        self._running: RunningEpoch | None = None
        self._closed = False
        self._lock = threading.RLock()
        self._pid = os.getpid()

    # Life

    def open(self) -> Fleet:
        """List the source, join Ray and start the ranks; not needed, but then nothing waits later.

        Raises:
            CatalogError: the source cannot be listed.
            ClusterError: Ray cannot be joined or started.
        """
        with self._lock:
            if self._closed:
                raise UsageError("this Fleet is closed; make a new one")
            if os.getpid() != self._pid:
                raise UsageError("this Fleet was made in another process")
            if self._crew is None:
                access = Access.found(os.environ, self._options)
                catalog = Catalog.from_source(self._source, access=access)
                _require_enough(catalog, self._ranks)
                crew = Crew(catalog, self._options)
                weakref.finalize(self, _end, crew, self._pid)
                self._crew = crew
            self._crew.grow(self._ranks)
        return self

    def close(self) -> None:
        """End all ranks and their readers; a running epoch is stopped. Idempotent."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closed = True
            running, self._running = self._running, None
            if running is not None:
                running.stop()
            crew, self._crew = self._crew, None
            if crew is not None:
                crew.close()

    def __enter__(self) -> Fleet:
        return self.open()

    def __exit__(self, *exception: object) -> None:
        self.close()

    # What it is, and may be set

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self._ranks

    @property
    def options(self) -> Options:
        """Of every rank."""
        return self._options

    @property
    def catalog(self) -> Catalog | None:
        """What exists; ``None`` until it is opened."""
        return self._crew.catalog if self._crew is not None else None

    @property
    def pids(self) -> list[int]:
        """Processes of the consumers, by rank; empty until it is opened."""
        return [member.hello.pid for member in self._crew.members] if self._crew else []

    @property
    def concurrency(self) -> int:
        """Ceiling on reads in flight per rank [reads]; may be set while an epoch runs."""
        return self._options.concurrency

    @concurrency.setter
    def concurrency(self, concurrency: int) -> None:
        self._options = self._options.replace(concurrency=concurrency)
        if self._crew is not None:
            self._crew.set_concurrency(concurrency)

    @property
    def compute_seconds(self) -> float:
        """The training step that is imitated, per batch [s]; set, it counts from the next epoch."""
        return self._compute_seconds

    @compute_seconds.setter
    def compute_seconds(self, seconds: float) -> None:
        if not 0 <= seconds < float("inf"):
            raise OptionError(f"compute_seconds={seconds}: must be seconds >= 0")
        self._compute_seconds = seconds

    @property
    def touch(self) -> bool:
        """Look at every byte that is delivered; set, it counts from the next epoch."""
        return self._touch

    @touch.setter
    def touch(self, touch: bool) -> None:
        if touch and not self._options.deliver:
            raise OptionError("touch needs the bytes to be delivered, not deliver=False")
        self._touch = touch

    # What it does

    def run_epoch(self, epoch: int | None = None) -> EpochReport:
        """Read an epoch on all ranks.

        Args:
            epoch: its number, which decides the order; not given: the one after the last.

        Raises:
            RayloaderError: a rank has failed. The others have ended, and another epoch may be run.
        """
        return self.start_epoch(epoch).report()

    def start_epoch(self, epoch: int | None = None) -> RunningEpoch:
        """Begin an epoch and return while it runs; see :meth:`run_epoch`.

        Raises:
            UsageError: one is running.
        """
        number = self._epoch if epoch is None else _whole("epoch", epoch, least=0)
        with self._lock:
            if self._running is not None and self._running.alive:
                raise UsageError("an epoch is running: wait for its report(), or stop() it")
            self.open()
            assert self._crew is not None
            watch = FleetWatch(console_of_progress(), self._progress)
            run = Epoch(self._crew, number, self._compute_seconds, self._touch, watch)
            self._running = RunningEpoch(run, watch, self._crew, self._compute_seconds)
            self._epoch = number + 1
            return self._running

    def scale(self, ranks: int) -> None:
        """Change the number of ranks, now. Those that stay keep their processes.

        While an epoch runs, all ranks read to a common step, and what is left is dealt out to the
        new number. Returns when they read.

        Raises:
            OptionError: ``ordered=False`` and an epoch is running.
            EmptyCatalog: there are fewer samples than ranks.
            ClusterError: Ray cannot place more.
        """
        ranks = _whole("ranks", ranks)
        with self._lock:
            running = self._running if self._running is not None and self._running.alive else None
            if running is not None:
                require_ordered(self._options.ordered, ranks)
            if self._crew is not None:
                _require_enough(self._crew.catalog, ranks)
                self._crew.grow(ranks)
                if running is not None:
                    running.change_ranks(ranks)
                self._crew.shrink(ranks)
            self._ranks = ranks

    def page_cache(self, drop: bool = False) -> float | None:
        """Share of some of the files that the page cache holds [0..1]; ``None``: unknown.

        Of several nodes, the share of that which differs most from what was wanted: with ``drop``
        the largest, otherwise the smallest.

        Args:
            drop: first have every node forget them.
        """
        with self._lock:
            self.open()
            assert self._crew is not None
            shares = [share for share in self._crew.page_cache(drop) if share is not None]
            return (max if drop else min)(shares) if shares else None

    def sweep(
        self,
        ranks: Sequence[int],
        concurrency: Sequence[int] | None = None,
        *,
        epochs: int = 2,
        repeats: int = 3,
        cache: Cache = "any",
        seed: int = 0,
        out: str | os.PathLike[str] | None = None,
        watch: Watch | None = None,
    ) -> pa.Table:
        """Measure every number of ranks with every concurrency.

        Trials come in random order. Each begins with a warm-up epoch, which does not count, and
        all read the same orders. Afterwards ranks and concurrency are as before.

        Args:
            ranks: numbers of ranks.
            concurrency: ceilings on reads in flight; not given: the one in force [reads].
            epochs: measured in each trial.
            repeats: trials of each point.
            cache: ``hot`` or ``cold``: what the page cache must be like before each measured epoch;
                it is made so, looked at, and recorded. ``any``: only recorded.
            seed: of the order of trials.
            out: a directory for the records, where an interrupted sweep goes on when it is called
                again, and for ``results.parquet``; not given: in memory.
            watch: who is told how it goes on; not given: a line on a terminal.

        Returns:
            A row per epoch; :func:`rayloader.plot` draws it.

        Raises:
            OptionError: a value out of range, or ``out`` has another sweep.
            StorageError: ``out`` cannot be made.
            RayloaderError: a rank has failed. What is recorded stays.
        """
        plan = SweepPlan(
            ranks=tuple(ranks),
            concurrency=tuple(concurrency if concurrency is not None else [self.concurrency]),
            epochs=epochs,
            repeats=repeats,
            cache=cache,
            seed=seed,
        )
        directory = os.fspath(out) if out is not None else None
        if directory is not None:
            make_directory(directory)
        ranks_before, watching = self._ranks, SweepWatch(console_of_progress(), self._progress)
        records = self._records(plan, directory)
        with self._put_back(ranks_before), watching:
            self._progress = False
            run_trials(self, plan, records, watch or watching)
        table = table_of(records.lines)
        if directory is not None:
            save_table(table, directory)
        return table

    @contextlib.contextmanager
    def _put_back(self, ranks: int) -> Iterator[None]:
        """So many ranks afterwards; concurrency and progress as they are now."""
        concurrency, progress = self.concurrency, self._progress
        try:
            yield
        finally:
            self._progress = progress
            if not self._closed and not (self._running and self._running.alive):
                self.concurrency = concurrency
                self.scale(ranks)

    def _records(self, plan: SweepPlan, directory: str | None) -> Records:
        """What the same sweep has recorded before, if it has; the ranks of its first trial run."""
        if self._crew is None:
            self._ranks = plan.trials[0].ranks  # no more are started than that needs
        self.open()
        assert self._crew is not None
        catalog = self._crew.catalog
        _require_enough(catalog, max(plan.ranks))
        about = subject(plan, catalog, self._options, self._compute_seconds, self._touch)
        records = Records(directory, about)
        records.add(session(catalog, self._options))
        return records

    def grid(self) -> Grid:
        """The ranks, as a table."""
        members = self._crew.members if self._crew is not None else []
        rows = tuple(
            (str(it.rank), it.hello.host, str(it.hello.pid), str(it.hello.cpus)) for it in members
        )
        note = f"concurrency {self.concurrency}, batch {self._options.batch_size}"
        title = f"Fleet: {counted(self._ranks, 'rank')}" + ("" if members else ", not started")
        return Grid(title, ("rank", "<node", "pid", "CPUs"), rows, notes=(note,))

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open" if self._crew is not None else "not started"
        return f"Fleet({counted(self._ranks, 'rank')}, concurrency {self.concurrency}, {state})"

    def _repr_html_(self) -> str:
        return self.grid().html()


class RunningEpoch:
    """An epoch under way: :meth:`report` waits for it, :meth:`stop` ends it."""

    def __init__(self, epoch: Epoch, watch: FleetWatch, crew: Crew, compute_seconds: float) -> None:
        def finish(outcome: Outcome) -> EpochReport:
            report = EpochReport(outcome, crew.options, compute_seconds)
            if report.evidence.waits_for_storage:
                report = dataclasses.replace(report, latency_alone=crew.read_alone())
            return report

        self._running = Running(epoch, finish, watch)

    @property
    def alive(self) -> bool:
        """True until it has ended."""
        return self._running.alive

    def change_ranks(self, ranks: int) -> None:
        """See :meth:`Fleet.scale`, which starts and ends ranks beside."""
        self._running.change_ranks(ranks)

    def report(self) -> EpochReport:
        """Wait for its end; what it was. Ctrl-C stops it.

        Raises:
            RayloaderError: a rank has failed, or it was stopped.
        """
        return self._running.result()

    def stop(self) -> None:
        """End it where it is, and wait for that; nothing happens when it has ended."""
        self._running.stop()


def _whole(name: str, value: Any, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OptionError(f"{name}={value!r}: must be a whole number >= {least}")
    return value


def _require_enough(catalog: Catalog, ranks: int) -> None:
    if len(catalog) < ranks:
        raise EmptyCatalog(
            f"{len(catalog)} entries are too few for {ranks} ranks: each needs one; use fewer ranks"
        )


def _end(crew: Crew, pid: int) -> None:
    """A forgotten Fleet leaves nothing; in a forked child there is nothing to end."""
    if os.getpid() == pid:
        crew.close()
