"""Read a data set on several ranks, as training would, and measure it: ``rayloader read``.

One process per rank, each with a ``RankDataset`` of the same private Ray and the same catalog.
Every epoch begins on all ranks at once, so the rate of all ranks together is what they read,
divided by the time from the common start to the last rank's end.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import time
from collections.abc import Callable
from typing import Any, Protocol

from rayloader.catalog import Catalog, Source
from rayloader.config import RUN_GONE_SECONDS, Options
from rayloader.errors import OptionError
from rayloader.experiment.pagecache import cached_share
from rayloader.experiment.processes import Census
from rayloader.experiment.ranks import (
    Done,
    First,
    Loader,
    Moved,
    RankProcesses,
    Ready,
    Said,
    Task,
)
from rayloader.plan import EpochPlan, Shard
from rayloader.storage.access import Access
from rayloader.storage.uri import is_object

PEERS: tuple[Loader, ...] = ("torch-kept", "torch-respawned", "torch-in-process")
"""The ways to run torch's DataLoader that rayloader is compared with."""


@dataclasses.dataclass(frozen=True)
class ReadJob:
    """What to read, on how many ranks, and how.

    Attributes:
        source: as ``RankDataset`` takes it.
        ranks: processes on this machine, > 0.
        epochs: > 0.
        options: of every rank.
        compute_seconds: the training step that is imitated, per batch, >= 0 [s].
        touch: look at every byte that is delivered.
        compare: run torch's DataLoader too.
        workers: of torch's DataLoader, per rank, > 0 [processes].
        worker_start: how these are started (``fork``, ``spawn``, ``forkserver``); ``None``: as
            this Python does it.

    Raises:
        OptionError: a value out of range, or two that exclude each other.
    """

    source: Source
    ranks: int = 1
    epochs: int = 1
    options: Options = dataclasses.field(default_factory=Options)
    compute_seconds: float = 0.0
    touch: bool = False
    compare: bool = False
    workers: int = 2
    worker_start: str | None = None

    def __post_init__(self) -> None:
        for name in ("ranks", "epochs", "workers"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name}={getattr(self, name)}: must be at least 1")
        if not 0 <= self.compute_seconds < float("inf"):
            raise OptionError(f"compute_seconds={self.compute_seconds}: must be seconds >= 0")
        for name in ("touch", "compare"):
            if getattr(self, name) and not self.options.deliver:
                raise OptionError(f"{name} needs the bytes to be delivered, not deliver=False")

    @property
    def loaders(self) -> tuple[Loader, ...]:
        """What runs, in this order."""
        return ("rayloader", *PEERS) if self.compare else ("rayloader",)


@dataclasses.dataclass(frozen=True)
class EpochResult:
    """One epoch on all ranks. Times are on the node's monotonic clock.

    Attributes:
        epoch: its number.
        started_at: the common start [s].
        before: when the last rank ended the epoch before; ``None`` for the first [s].
        ranks: what each rank did, in their order.
        processes_started: processes of the run that appeared since the epoch before was counted;
            it is counted whenever a rank has its first batch.
    """

    epoch: int
    started_at: float
    before: float | None
    ranks: tuple[Done, ...]
    processes_started: int

    @property
    def ended_at(self) -> float:
        """When the last rank ended [s]."""
        return max(done.ended_at for done in self.ranks)

    @property
    def seconds(self) -> float:
        """From the common start to the last rank's end [s]."""
        return self.ended_at - self.started_at

    @property
    def first_batch_seconds(self) -> float:
        """From the common start to the first batch of the rank that had it last [s]."""
        return max(done.first_at for done in self.ranks) - self.started_at

    @property
    def gap_seconds(self) -> float:
        """From the end of the epoch before to the last rank's first batch; 0 for the first [s]."""
        if self.before is None:
            return 0.0
        return self.first_batch_seconds + self.started_at - self.before

    @property
    def files(self) -> int:
        """Samples delivered on all ranks [samples]."""
        return self.total("files")

    @property
    def bytes(self) -> int:
        """Bytes delivered on all ranks [bytes]."""
        return self.total("bytes")

    def total(self, name: str) -> int:
        """Sum of a field of the ranks' receipts."""
        return sum(done.receipt[name] for done in self.ranks)

    def asdict(self) -> dict[str, Any]:
        """The epoch's own figures, and the ranks' receipts."""
        return {
            "epoch": self.epoch,
            "files": self.files,
            "bytes": self.bytes,
            "seconds": self.seconds,
            "bytes_per_second": self.bytes / self.seconds,
            "files_per_second": self.files / self.seconds,
            "first_batch_seconds": self.first_batch_seconds,
            "gap_seconds": self.gap_seconds,
            "processes_started": self.processes_started,
            "receipts": [done.receipt for done in self.ranks],
        }


@dataclasses.dataclass(frozen=True)
class LoaderResult:
    """What one loader did.

    Attributes:
        loader: which.
        start_seconds: from the start of its processes until all ranks were ready [s].
        cached: share of the files in the page cache before it began [0..1]; ``None``: unknown.
        epochs: in their order.
    """

    loader: Loader
    start_seconds: float
    cached: float | None
    epochs: tuple[EpochResult, ...]

    @property
    def later(self) -> tuple[EpochResult, ...]:
        """All epochs but the first, which differs: memory is new, and perhaps the cache cold."""
        return self.epochs[1:]

    def asdict(self) -> dict[str, Any]:
        """Everything by name."""
        return {
            "loader": self.loader,
            "start_seconds": self.start_seconds,
            "cached_share_before": self.cached,
            "epochs": [it.asdict() for it in self.epochs],
        }


@dataclasses.dataclass(frozen=True)
class ReadResult:
    """What a job did.

    Attributes:
        job: which.
        catalog: what there was to read.
        list_seconds: how long listing it took, before any clock [s].
        loaders: in the order they ran; each has the epochs that all ranks have finished, > 0.
        interrupted: Ctrl-C or an error has ended it before it was through.
    """

    job: ReadJob
    catalog: Catalog
    list_seconds: float
    loaders: tuple[LoaderResult, ...]
    interrupted: bool = False

    @property
    def comparable(self) -> ReadResult:
        """With the loaders only that have finished all epochs."""
        whole = tuple(it for it in self.loaders if len(it.epochs) == self.job.epochs)
        return dataclasses.replace(self, loaders=whole)


class Watch(Protocol):
    """Who is told how a job goes on."""

    def listed(self, entries: int) -> None:
        """So many entries have been found so far."""

    def starting(self, loader: Loader) -> None:
        """A loader's processes are being started."""

    def moved(self, rank: int, moved: Moved) -> None:
        """A rank is so far."""

    def epoch_done(self, loader: Loader, result: EpochResult) -> None:
        """All ranks have read an epoch."""

    def said(self, rank: int, text: str) -> None:
        """A rank warns."""


def read(
    job: ReadJob, watch: Watch, cut_short: Callable[[ReadResult], object] | None = None
) -> ReadResult:
    """Run a job. Whatever it starts has ended when this returns or raises.

    Args:
        job: what to do.
        watch: is told how it goes on.
        cut_short: is given what was measured, if anything, before this raises.

    Raises:
        CatalogError: the source cannot be listed, or holds too little.
        RayloaderError: a rank has failed; all are ended.
    """
    began = time.perf_counter()
    access = Access.found(os.environ, job.options)
    catalog = Catalog.from_source(
        job.source, progress=watch.listed, access=access, etags=job.options.verify
    )
    listed = time.perf_counter() - began
    _check_plan(job, catalog)
    if job.compare and is_object(catalog.root):
        raise OptionError(
            "compare: torch's DataLoader reads files here, and this source has objects; "
            "benchmarks/objects.py compares loaders of objects"
        )
    fd = catalog.to_fd()
    results: list[LoaderResult] = []
    try:
        for loader in job.loaders:
            _run(loader, job, catalog, fd, watch, results)
    except BaseException:  # Ctrl-C is one too
        if cut_short is not None and results:
            cut_short(ReadResult(job, catalog, listed, tuple(results), interrupted=True))
        raise
    finally:
        os.close(fd)
    return ReadResult(job, catalog, listed, tuple(results))


def _check_plan(job: ReadJob, catalog: Catalog) -> None:
    """Find what any rank would find out, before there are ranks."""
    options = job.options
    plan = EpochPlan(
        len(catalog),
        Shard(0, job.ranks),
        options.batch_size,
        shuffle=options.shuffle,
        uneven=options.uneven,
        drop_last=options.drop_last,
    )
    if plan.steps == 0:
        raise OptionError(
            f"batch_size={options.batch_size} with drop_last leaves nothing to read: each of "
            f"{job.ranks} ranks has fewer than that of the {len(catalog)} files"
        )


def _run(
    loader: Loader,
    job: ReadJob,
    catalog: Catalog,
    fd: int,
    watch: Watch,
    results: list[LoaderResult],
) -> None:
    """Run one loader on all ranks, and wait until all of it is gone.

    Its epochs are added to ``results``, also where it raises.
    """
    run_id = f"read:{secrets.token_hex(8)}"
    census = Census(run_id)
    census.appeared()
    cached = cached_share(catalog)
    watch.starting(loader)
    began = time.perf_counter()
    tasks = [_task(loader, job, rank) for rank in range(job.ranks)]
    try:
        with RankProcesses(tasks, fd, run_id) as ranks:
            lead = _Lead(loader, ranks, job.ranks, census, watch)
            try:
                lead.through()
            finally:
                if lead.epochs:
                    epochs = tuple(lead.epochs)
                    results.append(LoaderResult(loader, lead.ready_at - began, cached, epochs))
    finally:
        if not census.wait_until_gone(RUN_GONE_SECONDS):
            watch.said(0, f"processes that were started still run: {sorted(census.living())}")


def _task(loader: Loader, job: ReadJob, rank: int) -> Task:
    return Task(
        loader,
        rank,
        job.ranks,
        job.epochs,
        job.options,
        job.touch,
        job.compute_seconds,
        job.workers,
        job.worker_start,
    )


class _Lead:
    """Leads the ranks of one loader through their epochs and writes down what they did."""

    def __init__(
        self, loader: Loader, ranks: RankProcesses, count: int, census: Census, watch: Watch
    ) -> None:
        self.epochs: list[EpochResult] = []
        self.ready_at = 0.0
        self._loader = loader
        self._ranks = ranks
        self._count = count
        self._census = census
        self._watch = watch
        self._ready: set[int] = set()
        self._done: dict[int, Done] = {}
        self._started_at = 0.0
        self._appeared = 0

    def through(self) -> None:
        """Lead until every rank has ended.

        Raises:
            RayloaderError: one has failed.
        """
        for rank, message in self._ranks.messages():
            match message:
                case Ready(epoch):
                    self._is_ready(rank, epoch)
                case First():
                    # Now: workers that are made for an epoch are gone at its end.
                    self._appeared += self._census.appeared()
                case Done():
                    self._is_done(rank, message)
                case Moved():
                    self._watch.moved(rank, message)
                case Said(_, text):
                    self._watch.said(rank, text)

    def _is_ready(self, rank: int, epoch: int) -> None:
        self._ready.add(rank)
        if len(self._ready) < self._count:
            return
        self._ready.clear()
        if not self.epochs:
            self.ready_at = time.perf_counter()
        self._started_at = self._ranks.go(epoch)

    def _is_done(self, rank: int, done: Done) -> None:
        self._done[rank] = done
        if len(self._done) < self._count:
            return
        before = self.epochs[-1].ended_at if self.epochs else None
        ranks = tuple(self._done[rank] for rank in sorted(self._done))
        result = EpochResult(done.epoch, self._started_at, before, ranks, self._appeared)
        self._done.clear()
        self._appeared = 0
        self.epochs.append(result)
        self._watch.epoch_done(self._loader, result)
