"""Loaders that deliver the same files as tensors to a training loop, one process each.

Method: every peer gives a function ``epoch(number)`` that yields batches, each a sequence of 1-D
uint8 tensors, one per file. One training loop, the same for all, takes the batches: it touches
every sample (its length), and sums or checks every byte when told to. Only the loop looks at the
clock: from just before the epoch is asked for to the moment the last batch has been dealt with.

Command: ``python -m benchmarks.peers NAME files=LISTING batch_size=24 …``; then each line on
standard input, ``epochs=3 trainer=count …``, is answered with one line of JSON per epoch (seconds
of CLOCK_MONOTONIC), as peer.c does. ``trainer`` is ``count``, ``sum`` or ``verify``; ``start`` is
the moment to begin, for ranks that begin together; the other words belong to the peer.

Peers, each in the quickest form found on a 2-core machine; all shuffle every epoch:

- torch ``DataLoader`` over a map-style data set: ``os.open``, ``fstat``, ``readv`` into a fresh
  NumPy array (``np.fromfile``, as it is commonly written, takes twice as long for a small file; it
  is measured as ``plain``). Batches are collated by torch's ``default_collate`` (``stack``: files
  of one size only), into one flat tensor that is split by the trainer (``flat``: in a worker it is
  written directly to shared memory), or not at all (``list``: without workers nothing is copied,
  with workers every sample is a shared-memory object of its own, which is far slower).
- the same with ``__getitems__`` and a pool of threads in each process.
- SPDL: a pipeline of threads whose unit of work is one file or one whole batch.
- Ray Data: ``read_binary_files`` and ``iter_batches``.
- rayloader: ``RankDataset``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, Protocol, TextIO

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from benchmarks.files import WORD, sample_digest


class Samples(Protocol):
    """One batch as the training loop sees it: some 1-D uint8 tensors."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[torch.Tensor]: ...


@dataclasses.dataclass(frozen=True)
class Peer:
    """One loader, open.

    Attributes:
        epoch: ``epoch(number, **words)`` gives the batches of one epoch; ``words`` are those of the
            order that concern the peer.
        facts: what the loader itself says about the epoch that has just ended.
    """

    epoch: Callable[..., Iterator[Samples]]
    facts: Callable[[], dict[str, Any]] = dict


def read_file(path: str) -> torch.Tensor:
    """One file as a 1-D uint8 tensor: four system calls, no copy."""
    fd = os.open(path, os.O_RDONLY)
    try:
        content = np.empty(os.fstat(fd).st_size, np.uint8)
        room, done = content.data, 0
        while done < content.size:
            got = os.readv(fd, [room[done:]])
            if not got:
                raise EOFError(path)
            done += got
    finally:
        os.close(fd)
    return torch.from_numpy(content)


def read_file_plainly(path: str) -> torch.Tensor:
    """The same in one line, as it is commonly written."""
    return torch.from_numpy(np.fromfile(path, np.uint8))


READ = {"quick": read_file, "plain": read_file_plainly}


class MapDataset(Dataset[torch.Tensor]):
    """Files by index, one by one; ``read`` names the way."""

    def __init__(self, paths: list[str], read: str) -> None:
        self.paths = paths
        self.read = READ[read]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.read(self.paths[index])


class ThreadedDataset(MapDataset):
    """Files by index, a batch at a time, read by a pool of threads of this process."""

    def __init__(self, paths: list[str], read: str, threads: int) -> None:
        super().__init__(paths, read)
        self.threads = threads
        self._pool: ThreadPoolExecutor | None = None

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        if self._pool is None:  # made where it is used: threads do not survive a fork
            self._pool = ThreadPoolExecutor(self.threads)
        return list(self._pool.map(self.__getitem__, indices))


def as_list(samples: list[torch.Tensor]) -> list[torch.Tensor]:
    """No collation."""
    return samples


def as_flat(samples: list[torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
    """The samples behind one another, and their sizes; a worker uses shared memory.

    It does so as torch's own ``default_collate`` does.
    """
    sizes = [sample.numel() for sample in samples]
    if get_worker_info() is None:
        return torch.cat(samples), sizes
    storage = torch.UntypedStorage._new_shared(sum(sizes))  # type: ignore[no-untyped-call]
    shared = torch.empty(0, dtype=torch.uint8).set_(storage)
    return torch.cat(samples, out=shared), sizes


COLLATE = {
    "list": (as_list, lambda batch: batch),
    "stack": (default_collate, torch.unbind),
    "flat": (as_flat, lambda batch: batch[0].split(batch[1])),
}
"""Name → (what makes a batch of samples, what makes samples of a batch)."""


@contextlib.contextmanager
def torch_loader(files: str, batch_size: int) -> Iterator[Peer]:
    """``DataLoader``; the loaders of one process are kept, with their persistent workers."""
    paths = _lines(files)
    loaders: dict[tuple[Any, ...], DataLoader[Any]] = {}

    def epoch(
        number: int,
        *,
        workers: int = 0,
        collate: str = "stack",
        start_method: str = "fork",
        persistent: int = 1,
        threads: int = 0,
        read: str = "quick",
    ) -> Iterator[Samples]:
        key = (workers, collate, start_method, persistent, threads, read)
        if key not in loaders:
            loaders[key] = DataLoader(
                ThreadedDataset(paths, read, threads) if threads else MapDataset(paths, read),
                batch_size=batch_size,
                shuffle=True,
                num_workers=workers,
                collate_fn=COLLATE[collate][0],
                persistent_workers=bool(persistent and workers),
                multiprocessing_context=start_method if workers else None,
            )
        return map(COLLATE[collate][1], loaders[key])

    yield Peer(epoch)
    loaders.clear()


@contextlib.contextmanager
def spdl(files: str, batch_size: int) -> Iterator[Peer]:
    """SPDL: a new pipeline for each epoch, as its documentation has it; ``input`` order."""
    from spdl.pipeline import PipelineBuilder

    paths = _lines(files)

    def epoch(number: int, *, threads: int, unit: str) -> Iterator[Samples]:
        order = random.Random(number).sample(paths, len(paths))
        builder: Any = PipelineBuilder()
        if unit == "file":
            builder.add_source(order)
            builder.pipe(read_file, concurrency=threads, output_order="input")
            builder.aggregate(batch_size)
        else:
            builder.add_source(_cut(order, batch_size))
            builder.pipe(_read_files, concurrency=threads, output_order="input")
        pipeline = builder.add_sink(3).build(num_threads=threads)
        with pipeline.auto_stop():
            yield from pipeline

    yield Peer(epoch)


@contextlib.contextmanager
def ray_data(files: str, batch_size: int) -> Iterator[Peer]:
    """Ray Data on a Ray of its own; ``shuffle="files"`` permutes the files of each epoch."""
    os.environ.update(RAY_worker_niceness="0")  # as rayloader's own Ray has it
    import ray
    import ray.data

    with tempfile.TemporaryDirectory(prefix="rb-", ignore_cleanup_errors=True) as directory:
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=directory,
        )
        ray.data.DataContext.get_current().enable_progress_bars = False
        dataset = ray.data.read_binary_files(_lines(files), shuffle="files")

        def epoch(number: int) -> Iterator[Samples]:
            for batch in dataset.iter_batches(
                batch_size=batch_size, batch_format="pyarrow", prefetch_batches=4
            ):
                yield [_arrow_tensor(value) for value in batch["bytes"]]

        yield Peer(epoch)
        ray.shutdown()


@contextlib.contextmanager
def rayloader(
    source: str, batch_size: int, client: Literal["auto", "http", "obstore", "s3dlio"] = "auto"
) -> Iterator[Peer]:
    """``RankDataset`` over a directory or a saved catalog; its rank is the launcher's."""
    from rayloader import RankDataset, shutdown

    with RankDataset(source, batch_size=batch_size, shuffle=True, seed=7, client=client) as dataset:

        def epoch(number: int, *, concurrency: int = 64) -> Iterator[Samples]:
            if dataset.concurrency != concurrency:
                dataset.concurrency = concurrency
            dataset.set_epoch(number)
            return iter(dataset)

        def facts() -> dict[str, Any]:
            receipt = dataset.receipt
            return {name: getattr(receipt, name) for name in RECEIPT}

        yield Peer(epoch, facts)
    shutdown()


RECEIPT = (
    "reader_pid",
    "engine",
    "channel",
    "peak_in_flight",
    "mean_in_flight",
    "cpu_reader",
    "stall_seconds",
    "private_copies",
    "memory_bytes",
)
"""What is kept of rayloader's receipt."""

Opened = contextlib.AbstractContextManager[Peer]
PEERS: dict[str, Callable[..., Opened]] = {
    "torch": torch_loader,
    "spdl": spdl,
    "ray-data": ray_data,
    "rayloader": rayloader,
}


@dataclasses.dataclass
class Trainer:
    """The training loop: what it does with each batch, and what it has seen in this epoch."""

    work: str
    files: int = 0
    bytes: int = 0
    result: int = 0
    first: float = 0.0
    last: float = 0.0

    def train(self, batches: Iterator[Samples]) -> None:
        """Take one epoch."""
        for batch in batches:
            if not self.files:
                self.first = time.monotonic()
            self.files += len(batch)
            self._step(batch)
            self.last = time.monotonic()

    def _step(self, batch: Samples) -> None:
        if self.work == "sum":
            for sample in batch:
                self.bytes += sample.numel()
                self.result += int(torch.sum(sample, dtype=torch.int64))
        elif self.work == "verify":
            for sample in batch:
                self.bytes += sample.numel()
                self.result = (self.result + sample_digest(sample.numpy())) & WORD
        else:
            self.bytes += sum(map(torch.Tensor.numel, batch))


def main(known: Mapping[str, Callable[..., Opened]] = PEERS) -> None:
    """Answer orders until standard input ends."""
    answers = _private_stdout()
    name, words = sys.argv[1], _words(sys.argv[2:])
    with known[name](**words) as peer:
        _answer(answers, {"ready": True})
        number = 0
        for line in sys.stdin:
            order = _words(line.split())
            work, threads = order.pop("trainer", "count"), order.pop("trainer_threads", 1)
            epochs, start = order.pop("epochs"), order.pop("start", 0.0)
            torch.set_num_threads(threads)
            for _ in range(epochs):
                trainer = Trainer(work)
                time.sleep(max(0.0, start - time.monotonic()))
                begin = time.monotonic()
                trainer.train(peer.epoch(number, **order))
                number += 1
                seen = {**dataclasses.asdict(trainer), "begin": begin, "facts": peer.facts()}
                _answer(answers, seen)


def _answer(answers: TextIO, values: dict[str, Any]) -> None:
    answers.write(json.dumps(values) + "\n")
    answers.flush()


def _private_stdout() -> TextIO:
    """Standard output for our answers alone; what libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _words(words: Sequence[str]) -> dict[str, Any]:
    """``name=value`` words; values that look like numbers are numbers."""
    found: dict[str, Any] = {}
    for word in words:
        name, value = word.split("=", 1)
        try:
            found[name] = int(value)
        except ValueError:
            with contextlib.suppress(ValueError):
                found[name] = float(value)
            found.setdefault(name, value)
    return found


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def _cut(order: list[str], length: int) -> Iterator[list[str]]:
    return (order[at : at + length] for at in range(0, len(order), length))


def _read_files(paths: list[str]) -> list[torch.Tensor]:
    return [read_file(path) for path in paths]


def _arrow_tensor(value: Any) -> torch.Tensor:
    """A view of an Arrow binary value; torch warns that it is read-only, and nobody writes."""
    return torch.from_numpy(np.frombuffer(value.as_buffer(), np.uint8))


if __name__ == "__main__":
    main()
