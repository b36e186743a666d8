"""The peer: torch's own DataLoader on the same files, in the same order, on the same ranks.

A map-style data set whose items are whole files as uint8 tensors. Nothing is padded: a worker lays
a batch's samples behind one another in one piece of shared memory, which is about twice as fast as
a piece per sample; without workers nothing is copied. Three ways to run it: worker processes that
are kept, worker processes that are made anew each epoch with the epoch's list, and no workers.
"""

from __future__ import annotations

import dataclasses
import os
import resource
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from rayloader.catalog import Catalog
from rayloader.errors import Truncated
from rayloader.experiment.ranks import Moved, Task
from rayloader.plan import EpochPlan, Shard

Samples = Sequence[torch.Tensor]
Collated = tuple[torch.Tensor, list[int]] | Samples


@dataclasses.dataclass
class PeerReceipt:
    """What a peer's epoch delivered: those fields of a ``Receipt`` that can be known from outside.

    Names, units and clock are the receipt's: it starts before ``iter(loader)``, and ends when the
    iterator does.
    """

    epoch: int
    rank: int
    world_size: int
    steps_expected: int
    steps: int = 0
    files: int = 0
    bytes: int = 0
    seconds: float = 0.0
    first_batch_seconds: float = 0.0
    gap_seconds: float = 0.0
    stall_seconds: float = 0.0
    engine: str = "torch"
    channel: str = ""
    workers: int = 0

    def asdict(self) -> dict[str, Any]:
        """Every field by name."""
        return dataclasses.asdict(self)


class FileDataset(Dataset[torch.Tensor]):
    """Whole files as 1-D uint8 tensors.

    Args:
        paths: of the files.
        drop_cache: drop each file from the page cache before reading it.
    """

    def __init__(self, paths: list[str], drop_cache: bool) -> None:
        self._paths = paths
        self._drop_cache = drop_cache

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        with open(self._paths[index], "rb", buffering=0) as file:
            if self._drop_cache:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            content = np.empty(os.fstat(file.fileno()).st_size, np.uint8)
            done = 0
            while done < len(content):
                got = file.readinto(content.data[done:])
                if not got:
                    raise Truncated(self._paths[index], "ended before its measured size")
                done += got
        return torch.from_numpy(content)


class TorchFeed:
    """One rank's DataLoader, driven like a ``RankDataset``."""

    def __init__(self, task: Task, catalog: Catalog) -> None:
        """Read ``catalog`` as ``task`` says; acts on ``open``."""
        self._task = task
        self._workers = 0 if task.loader == "torch-in-process" else task.workers
        self._kept = task.loader == "torch-kept"
        self._paths = [
            os.path.join(os.fsdecode(catalog.root), os.fsdecode(key.as_py()))
            for key in catalog.keys
        ]
        self._batches: list[list[int]] = []
        self._kept_loader: DataLoader[Collated] | None = None
        self._ended_at: float | None = None
        self._receipt = PeerReceipt(0, task.rank, task.ranks, 0)

    def open(self) -> None:
        """Allow for what workers need: each sample in transit holds a file descriptor."""
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    def close(self) -> None:
        """Let the workers go."""
        self._kept_loader = None

    def set_epoch(self, epoch: int) -> None:
        """Plan the epoch: the batches that a ``RankDataset`` of this rank would deliver."""
        options, shard = self._task.options, Shard(self._task.rank, self._task.ranks)
        plan = EpochPlan(
            len(self._paths),
            shard,
            options.batch_size,
            epoch,
            options.seed,
            options.shuffle,
            options.uneven,
            options.drop_last,
        )
        self._batches = [entries.tolist() for entries in plan.batches()]
        self._receipt = PeerReceipt(
            epoch,
            shard.rank,
            shard.world_size,
            plan.steps,
            channel="worker processes" if self._workers else "in process",
            workers=self._workers,
        )

    def __iter__(self) -> Iterator[Samples]:
        receipt, began = self._receipt, time.perf_counter()
        iterator = iter(self._loader())
        called = began
        while True:
            collated = next(iterator, None)
            now = time.perf_counter()
            receipt.stall_seconds += now - called
            if collated is None:
                break
            batch = _samples(collated)
            if receipt.steps == 0:
                receipt.first_batch_seconds = now - began
                receipt.gap_seconds = 0.0 if self._ended_at is None else now - self._ended_at
            receipt.steps += 1
            receipt.files += len(batch)
            receipt.bytes += self.nbytes(batch)
            del collated
            yield batch
            del batch
            called = time.perf_counter()
        receipt.seconds, self._ended_at = now - began, now

    @staticmethod
    def nbytes(batch: Samples) -> int:
        """Bytes of a batch [bytes]."""
        return sum(len(sample) for sample in batch)

    def receipt(self) -> dict[str, Any]:
        """What the epoch has delivered."""
        return self._receipt.asdict()

    def moved(self) -> Moved:
        """How far the epoch is."""
        now = self._receipt
        return Moved(now.epoch, now.steps, now.steps_expected, now.files, now.bytes, 0.0)

    def _loader(self) -> DataLoader[Collated]:
        if not self._kept:
            # As with a list of files per epoch: the workers are told it when they start.
            mine = [self._paths[entry] for batch in self._batches for entry in batch]
            places = iter(range(len(mine)))
            return self._new([[next(places) for _ in batch] for batch in self._batches], mine)
        if self._kept_loader is None:
            self._kept_loader = self._new(_Batches(self), self._paths)
        return self._kept_loader

    def _new(self, batches: Any, paths: list[str]) -> DataLoader[Collated]:
        context = self._task.worker_start if self._workers else None
        # Its type is that of a batch, as collate_fn makes it, which the stubs cannot say.
        return DataLoader(
            FileDataset(paths, self._task.options.drop_cache),  # type: ignore[arg-type]
            batch_sampler=batches,
            num_workers=self._workers,
            persistent_workers=self._kept and self._workers > 0,
            multiprocessing_context=context,
            collate_fn=_as_flat if self._workers else _as_list,
        )


class _Batches:
    """The batches of the epoch that its feed is at, for a loader that outlives the epoch."""

    def __init__(self, feed: TorchFeed) -> None:
        self._feed = feed

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._feed._batches)

    def __len__(self) -> int:
        return len(self._feed._batches)


def _as_list(samples: Samples) -> Samples:
    return samples


def _as_flat(samples: Samples) -> tuple[torch.Tensor, list[int]]:
    """The samples behind one another in shared memory, where torch's default_collate puts them."""
    sizes = [len(sample) for sample in samples]
    storage = torch.UntypedStorage._new_shared(sum(sizes))  # type: ignore[no-untyped-call]
    return torch.cat(list(samples), out=torch.empty(0, dtype=torch.uint8).set_(storage)), sizes


def _samples(collated: Collated) -> Samples:
    """The samples of what a loader yields, as views."""
    return collated[0].split(collated[1]) if isinstance(collated, tuple) else collated
