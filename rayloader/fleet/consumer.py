"""The consumer of one rank: a training loop without the training, as a Ray actor.

Its calls run in threads: one reads, while others ask how far it is, or where it should stop.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import os
import platform
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rayloader.catalog import Catalog
from rayloader.config import Options
from rayloader.errors import RayloaderError, chained
from rayloader.experiment.consumer import look_at
from rayloader.experiment.pagecache import cached_share, forget
from rayloader.experiment.ranks import Moved
from rayloader.fleet.work import Hello, Part, Piece, Progress, left_over
from rayloader.launch import Launch
from rayloader.plan import Shard
from rayloader.storage.uri import is_object

if TYPE_CHECKING:
    from rayloader.dataset import RankDataset

CALLS_AT_ONCE = 8
"""Method calls served side by side; the driver has at most four under way."""
NOTED_EVERY = 0.2
"""Time between two notes of how far the rank is, from which it can be gone on with [s]."""
_DROPPED_AT_ONCE = 4096
"""Names looked up at once while files are dropped from the page cache [files]."""
_LINES = 100
"""Warnings kept until the driver asks for them [lines]."""


class Consumer:
    """Holds one rank's ``RankDataset``."""

    def __init__(
        self, catalog: Any, options: Options, launch: Launch, node_id: str, threads: int
    ) -> None:
        """Prepare to read; acts on :meth:`open`.

        Args:
            catalog: a :class:`SharedCatalog`.
            options: of the data set.
            launch: this rank's place.
            node_id: the Ray node that this is on, hex.
            threads: of torch.
        """
        self._catalog_of = catalog
        self._options = options.replace(ray="auto")
        self._launch = launch
        self._node_id = node_id
        self._threads = threads
        self._turns = Turns()
        self._progress: Progress | None = None
        self._said: collections.deque[str] = collections.deque(maxlen=_LINES)

    def open(self) -> Hello:
        """Start the reader.

        Raises:
            RayloaderError: it cannot be.
        """
        import torch

        from rayloader.dataset import RankDataset

        torch.set_num_threads(self._threads)
        logging.getLogger("rayloader").addHandler(_Keep(self._said))
        self._catalog = self._catalog_of.load()
        self._dataset: RankDataset = RankDataset(
            self._catalog, launch=self._launch, options=self._options
        )
        with _sendable():
            self._dataset.open()
        cpus = len(os.sched_getaffinity(0))
        self._hello = Hello(os.getpid(), self._node_id, platform.node(), cpus)
        return self._hello

    def read(self, piece: Piece) -> Part:
        """Read a piece of an epoch, or as much of it as :meth:`until` leaves.

        Raises:
            RayloaderError: what the data set raises.
        """
        with _sendable():
            self._turns.begin(piece.serial, piece.step, piece.stop)
            reading = _Reading(piece, self._hello)
            self._go_to(piece)
            plan = piece.plan(len(self._catalog), self._options)
            if self._follow(reading) and piece.shard.rank == 0 and (rest := left_over(plan)):
                self._go_to(Piece(piece.epoch, Shard(0, 1), plan.entries - rest))
                self._turns.begin(piece.serial, plan.steps, None)
                self._follow(reading)
            return reading.part(())

    def cut(self, serial: int) -> int:
        """Begin no further step of a piece until :meth:`until` says how many; the steps begun."""
        return self._turns.cut(serial)

    def until(self, serial: int, step: int) -> None:
        """End before this step of a piece; steps begun are finished in any case."""
        self._turns.until(serial, step)

    def progress(self) -> tuple[Progress | None, list[str]]:
        """How far the piece is, and what was logged since the last call."""
        lines = [self._said.popleft() for _ in range(len(self._said))]
        return self._progress, lines

    def set_concurrency(self, concurrency: int) -> None:
        """Change the ceiling on reads in flight, now [reads]."""
        self._dataset.concurrency = concurrency

    def read_alone(self, entries: Sequence[int]) -> float:
        """The median duration of reads of these entries, one at a time [s].

        Files are dropped from the page cache before, so that it is the storage that answers.
        """
        dataset, concurrency = self._dataset, self._dataset.concurrency
        keys = self._catalog.keys_at(np.asarray(entries, np.int64))
        paths = [os.path.join(self._catalog.root, key) for key in keys]
        if not is_object(self._catalog.root):
            for path in paths:
                forget(path)
        with _sendable():
            dataset.concurrency = 1
            try:
                dataset.set_epoch(0, files=paths, batch_size=len(paths))
                for batch in dataset:
                    del batch
                return dataset.receipt.latency_p50
            finally:
                dataset.concurrency = concurrency

    def page_cache(self, drop: bool) -> float | None:
        """Share of the files in this node's page cache [0..1]; ``None``: unknown, or objects.

        Args:
            drop: first have the kernel write what is new, and forget all files.
        """
        catalog = self._catalog
        if is_object(catalog.root):
            return None
        if drop:
            os.sync()
            for low in range(0, len(catalog), _DROPPED_AT_ONCE):
                entries = np.arange(low, min(low + _DROPPED_AT_ONCE, len(catalog)))
                for key in catalog.keys_at(entries):
                    forget(os.path.join(catalog.root, key))
        return cached_share(catalog)

    def close(self) -> None:
        """End the reader."""
        self._dataset.close()

    def _go_to(self, piece: Piece) -> None:
        dataset, shard = self._dataset, piece.shard
        dataset.reshard(shard.rank, shard.world_size)
        dataset.load_state_dict(
            {
                **dataset.state_dict(),
                "epoch": piece.epoch,
                "start": piece.start,
                "position": piece.start,
                "step": piece.step,
                "delivered": list(piece.delivered),
            }
        )

    def _follow(self, reading: _Reading) -> bool:
        """Iterate; ``False``: it was stopped before the end."""
        dataset, piece = self._dataset, reading.piece
        self._note(reading)
        batches, due = iter(dataset), time.perf_counter() + NOTED_EVERY
        begun = False
        while may := self._turns.take():
            begun = True
            if (batch := next(batches, None)) is None:
                break
            now = time.perf_counter()
            reading.first_at = reading.first_at or now
            if piece.touch:
                look_at(batch)
            # Its memory must be free before the next one is asked for.
            del batch
            if piece.compute_seconds:
                time.sleep(piece.compute_seconds)
            if now >= due:
                due = now + NOTED_EVERY
                self._note(reading)
        del batches
        if begun:
            reading.receipts.append(dataset.receipt.asdict())
        return may

    def _note(self, reading: _Reading) -> None:
        """Write down how far it is, between two batches, when all figures fit together."""
        if reading.receipts:  # what is left over is read again as a whole, if at all
            step = reading.piece.step + reading.steps
            self._progress = Progress(_moved(reading, None), step, (), reading.part(()))
            return
        state = self._dataset.state_dict()
        # Before the first batch the receipt is of the iteration before.
        running = self._dataset.receipt if reading.first_at else None
        self._progress = Progress(
            _moved(reading, running),
            state["step"],
            tuple(state["delivered"]),
            reading.part((running.asdict(),)) if running is not None else None,
        )


class _Reading:
    """A piece under way."""

    def __init__(self, piece: Piece, hello: Hello) -> None:
        self.piece = piece
        self.hello = hello
        self.began_at = time.perf_counter()
        self.first_at = 0.0
        self.receipts: list[dict[str, Any]] = []
        self._cpu = time.process_time()
        self._ticks = _ticks()

    @property
    def steps(self) -> int:
        return sum(receipt["steps"] for receipt in self.receipts)

    def part(self, running: tuple[dict[str, Any], ...]) -> Part:
        ended_at = time.perf_counter()
        return Part(
            self.piece.shard.rank,
            self.piece.shard.world_size,
            self.hello,
            self.began_at,
            self.first_at or ended_at,
            ended_at,
            time.process_time() - self._cpu,
            _busy(self._ticks, _ticks()),
            (*self.receipts, *running),
        )


class Turns:
    """Which steps a rank may begin. The reading thread takes them; other threads set the end.

    ::

        READING ──cut()──► HELD ──until(n)──► READING up to step n
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._serial = -1
        self._begun = 0
        self._stop: int | None = 0
        self._held = False

    def begin(self, serial: int, step: int, stop: int | None) -> None:
        """The next step of piece ``serial`` is ``step``; those from ``stop`` on are not read."""
        with self._changed:
            self._serial, self._begun, self._stop, self._held = serial, step, stop, False
            self._changed.notify_all()

    def take(self) -> bool:
        """Begin a step; waits while held. ``False``: there is none to begin."""
        with self._changed:
            while self._held:
                self._changed.wait()
            if self._stop is not None and self._begun >= self._stop:
                return False
            self._begun += 1
            return True

    def cut(self, serial: int) -> int:
        """Hold a piece, which may have been given a moment ago: how many steps have begun."""
        with self._changed:
            self._await(serial)
            self._held = True
            return self._begun

    def until(self, serial: int, step: int) -> None:
        """Let a piece go on, and end before ``step``."""
        with self._changed:
            self._await(serial)
            self._held, self._stop = False, step
            self._changed.notify_all()

    def _await(self, serial: int) -> None:
        """Calls of an actor with several threads may overtake each other."""
        while self._serial < serial:
            self._changed.wait()


@dataclasses.dataclass(frozen=True)
class SharedCatalog:
    """A catalog that another process has: mapped on its node, copied once to any other.

    Attributes:
        path: of the owner's open file.
        node_id: the owner's Ray node, hex.
        copy: a reference to ``Catalog.dumps()`` in Ray's object store; ``None``: there is one node.
        digest: of the catalog, which the owner has computed once for all.
        here: the node of the process that is given this.
    """

    path: str
    node_id: str
    copy: Any
    digest: str
    here: str = ""

    def load(self) -> Catalog:
        """The catalog.

        Raises:
            CatalogError: it is gone.
        """
        if self.here != self.node_id and self.copy is not None:
            import ray

            loaded = Catalog.loads(ray.get(self.copy), "the Fleet's catalog", b"/")
            return loaded.with_digest(self.digest)
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return Catalog.from_fd(fd).with_digest(self.digest)
        finally:
            os.close(fd)


class _Keep(logging.Handler):
    """Keeps warnings for the driver."""

    def __init__(self, lines: collections.deque[str]) -> None:
        super().__init__(logging.WARNING)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())


@contextlib.contextmanager
def _sendable() -> Iterator[None]:
    """Let rayloader's errors out as they are; what they were raised from need not survive."""
    try:
        yield
    except RayloaderError as error:
        raise error from chained(error.__cause__) if error.__cause__ is not None else None
    except Exception as error:
        words = (str(error).strip().splitlines() or [""])[0]
        raise RayloaderError(f"{type(error).__name__}: {words}".rstrip(": ")) from chained(error)


def _ticks() -> tuple[int, int]:
    """What the node's CPUs have done since it started: busy, and in all [ticks]."""
    with open("/proc/stat", "rb") as file:
        user, nice, system, idle, waiting, *more = map(int, file.readline().split()[1:9])
    busy = user + nice + system + sum(more)
    return busy, busy + idle + waiting


def _busy(before: tuple[int, int], after: tuple[int, int]) -> float:
    """Share of the CPUs' time between two looks at :func:`_ticks` that was used [0..1]."""
    return (after[0] - before[0]) / max(after[1] - before[1], 1)


def _moved(reading: _Reading, receipt: Any) -> Moved:
    """For display; ``receipt`` is of the running iteration, or ``None``."""
    figures = [*reading.receipts, *([receipt.asdict()] if receipt is not None else [])]
    return Moved(
        reading.piece.epoch,
        sum(one["steps"] for one in figures),
        sum(one["steps_expected"] for one in figures),
        sum(one["files"] for one in figures),
        sum(one["bytes"] for one in figures),
        sum(one["mean_in_flight"] * one["seconds"] for one in figures),
    )
