"""One rank of ``rayloader read``: a training loop without the training.

``python -m rayloader.experiment.consumer PIPE CATALOG`` where both are inherited descriptors; see
:mod:`rayloader.experiment.ranks` for what is said over the pipe.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any, NoReturn, Protocol

from rayloader.catalog import Catalog
from rayloader.errors import RayloaderError
from rayloader.experiment.ranks import Done, Failed, First, Go, Moved, Ready, Said, Task

_MOVED_EVERY = 0.2
"""Time between two reports of progress [s]."""
_PR_SET_PDEATHSIG = 1
_ENDED = 143
"""Exit status of a rank that was told to end: 128 + SIGTERM."""


class Feed(Protocol):
    """What brings batches to a training loop."""

    def open(self) -> None:
        """Start what is started once."""
        ...

    def close(self) -> None:
        """End it."""
        ...

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration reads."""
        ...

    def __iter__(self) -> Iterator[Any]:
        """Yield the epoch's batches: iterables of uint8 tensors."""
        ...

    def receipt(self) -> dict[str, Any]:
        """What the epoch has really read."""
        ...

    def moved(self) -> Moved:
        """How far it is."""
        ...


class RayloaderFeed:
    """A ``RankDataset``; its rank comes from the environment, as under any launcher."""

    def __init__(self, task: Task, catalog: Catalog) -> None:
        """Read ``catalog`` as ``task`` says; acts on ``open``."""
        from rayloader.dataset import RankDataset

        self._dataset = RankDataset(catalog, options=task.options)

    def open(self) -> None:
        """Join Ray and start the reader."""
        self._dataset.open()

    def close(self) -> None:
        """End the reader and leave Ray."""
        from rayloader.cluster import shutdown

        self._dataset.close()
        shutdown()

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration reads."""
        self._dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._dataset)

    def receipt(self) -> dict[str, Any]:
        """The data set's receipt, as a dict."""
        return self._dataset.receipt.asdict()

    def moved(self) -> Moved:
        """How far the epoch is."""
        now = self._dataset.receipt
        reading = now.mean_in_flight * now.seconds
        return Moved(now.epoch, now.steps, now.steps_expected, now.files, now.bytes, reading)


def main() -> None:
    """Read as the driver says, until it is done, told to end, or the driver is gone."""
    link = Connection(int(sys.argv[1]))
    task: Task = link.recv()
    _die_with(task.driver)
    signal.signal(signal.SIGTERM, _end)
    logging.getLogger("rayloader").addHandler(_ToDriver(link))
    catalog_fd = int(sys.argv[2])
    catalog = Catalog.from_fd(catalog_fd)
    os.close(catalog_fd)
    try:
        with contextlib.closing(_feed(task, catalog)) as feed:
            feed.open()
            for epoch in range(task.epochs):
                _read(feed, epoch, task, link)
    except (BrokenPipeError, EOFError) as gone:
        raise SystemExit(_ENDED) from gone
    except Exception as error:
        link.send(_failed(error))


def _read(feed: Feed, epoch: int, task: Task, link: Connection) -> None:
    """Read one epoch, beginning when every rank is ready."""
    feed.set_epoch(epoch)
    link.send(Ready(epoch))
    told: Go = link.recv()
    assert told.epoch == epoch
    first_at, due = 0.0, time.perf_counter() + _MOVED_EVERY
    for batch in feed:
        now = time.perf_counter()
        if not first_at:
            first_at = now
            link.send(First(epoch))
        if task.touch:
            look_at(batch)
        if task.compute_seconds:
            time.sleep(task.compute_seconds)
        if now >= due:
            due = now + _MOVED_EVERY
            link.send(feed.moved())
        # Its memory must be free before the next one is asked for.
        del batch
    ended_at = time.perf_counter()
    link.send(Done(epoch, first_at or ended_at, ended_at, feed.receipt()))


def look_at(batch: Any) -> None:
    """Read every byte of a batch."""
    for sample in batch:
        if len(sample):
            sample.max()


def _feed(task: Task, catalog: Catalog) -> Feed:
    if task.loader == "rayloader":
        return RayloaderFeed(task, catalog)
    from rayloader.experiment.peers import TorchFeed

    return TorchFeed(task, catalog)


def _failed(error: Exception) -> Failed:
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, RayloaderError):
        # What it was raised from stays here: it need not survive the way.
        error.__cause__ = error.__context__ = error.__traceback__ = None
        return Failed(error, trace)
    words = (str(error).strip().splitlines() or [""])[0]
    return Failed(RayloaderError(f"{type(error).__name__}: {words}".rstrip(": ")), trace)


def _die_with(driver: int) -> None:
    """Have the kernel end this process when its driver ends, however that happens."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != driver:
        os._exit(_ENDED)


def _end(*_: object) -> NoReturn:
    raise SystemExit(_ENDED)


class _ToDriver(logging.Handler):
    """Sends warnings to the driver, which has the terminal."""

    def __init__(self, link: Connection) -> None:
        super().__init__(logging.WARNING)
        self._link = link

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            self._link.send(Said(record.levelno, self.format(record)))


if __name__ == "__main__":
    main()
