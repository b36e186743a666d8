"""Who contends: every contender is described here, once."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from benchmarks.contender import Contender, Processes, python_peer
from benchmarks.files import FileSet

ARENA_BYTES = 512 << 20
LARGE_BATCH, SMALL_BATCH = 24, 256
"""Files per batch: for the large files and for the small ones."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """One run of the benchmarks.

    Attributes:
        data: the directory of files, catalogs and the compiled C reader.
        large: 2,000 files of 322,624 bytes.
        small: 20,000 files of 10,000 bytes.
        c_reader: the compiled peer.c.
        processes: the contenders' processes.
        rounds: how often each contender has a turn.
        seconds: about how long a turn is [s].
        seed: of the order within rounds.
        quick: fewer contenders, too.
    """

    data: Path
    large: FileSet
    small: FileSet
    c_reader: Path
    processes: Processes
    rounds: int
    seconds: float
    seed: int
    quick: bool


def batch_size(files: FileSet) -> int:
    """Files per batch for one of the two file sets."""
    return SMALL_BATCH if files.size < 1 << 16 else LARGE_BATCH


def c_readers(
    setting: Setting, files: FileSet, into: str = "arena", threads: tuple[int, ...] = (1, 2, 64)
) -> list[Contender]:
    """The C reader with several numbers of threads."""
    command = (str(setting.c_reader), str(files.listing), str(ARENA_BYTES))
    where = "" if into == "arena" else ", small buffer"
    return [
        Contender(
            f"C, {_many(count, 'thread')}{where}",
            command,
            {"threads": count, "into": into, "verify": 0},
            "c" if into == "arena" else "c small buffer",
        )
        for count in threads
    ]


def rayloader(files: FileSet, *, ranks: int = 1, **order: Any) -> Contender:
    """Our own, with one rank or several; ``order`` may hold ``concurrency``."""
    words = {"source": files.root, "batch_size": batch_size(files)}
    suffix = "".join(f", {name} {value}" for name, value in order.items() if name == "concurrency")
    name = f"rayloader, {ranks} ranks{suffix}" if ranks > 1 else f"rayloader{suffix}"
    return Contender(name, python_peer("rayloader", **words), order, "rayloader", ranks)


def torch_in_process(files: FileSet, collate: str) -> Contender:
    """``DataLoader(num_workers=0)``."""
    return Contender(
        f"torch, in-process, {collate}",
        _torch(files),
        {"workers": 0, "collate": collate},
        "torch in-process",
    )


def torch_in_process_tuned(files: FileSet, collate: str) -> Contender:
    """The same where malloc never gives memory back.

    As it comes, glibc returns the freed batches to the kernel or not, depending on what else the
    process has allocated; page faults then cost up to nine tenths of the rate.
    """
    torch = _torch(files)
    return Contender(
        f"torch, in-process, {collate}, malloc tuned",
        ("env", "MALLOC_TRIM_THRESHOLD_=1000000000", "MALLOC_MMAP_THRESHOLD_=1000000000", *torch),
        {"workers": 0, "collate": collate},
        "torch in-process, malloc tuned",
    )


def torch_plain(files: FileSet, workers: int) -> Contender:
    """``np.fromfile`` and torch's own collation, as commonly written."""
    where = _many(workers, "worker") if workers else "in-process"
    return Contender(
        f"torch, {where}, plain",
        _torch(files),
        {"workers": workers, "collate": "stack", "read": "plain"},
        "torch plain, workers" if workers else "torch plain, in-process",
    )


def torch_workers(
    files: FileSet, workers: int, collate: str, start_method: str = "fork"
) -> Contender:
    """``DataLoader`` with persistent workers."""
    how = ", spawned" if start_method == "spawn" else ""
    return Contender(
        f"torch, {_many(workers, 'worker')}, {collate}{how}",
        _torch(files),
        {"workers": workers, "collate": collate, "start_method": start_method},
        "torch workers",
    )


def torch_respawned(files: FileSet, start_method: str) -> Contender:
    """``DataLoader`` that starts 2 workers in every epoch."""
    return Contender(
        f"torch, 2 workers respawned ({start_method})",
        _torch(files),
        {"workers": 2, "collate": "stack", "persistent": 0, "start_method": start_method},
        "torch respawned",
    )


def torch_getitems(files: FileSet, workers: int) -> Contender:
    """``__getitems__`` with 64 threads in each process."""
    return Contender(
        f"torch, 64 threads, {_many(workers, 'worker')}",
        _torch(files),
        {"workers": workers, "collate": "flat", "threads": 64},
        "torch __getitems__",
    )


def spdl(files: FileSet, threads: int, unit: str) -> Contender:
    """SPDL, a task per file or per batch."""
    words = {"files": files.listing, "batch_size": batch_size(files)}
    return Contender(
        f"SPDL, {_many(threads, 'thread')}, a task per {unit}",
        python_peer("spdl", **words),
        {"threads": threads, "unit": unit},
        f"SPDL per {unit}",
    )


def ray_data(files: FileSet) -> Contender:
    """Ray Data on its own Ray."""
    words = {"files": files.listing, "batch_size": batch_size(files)}
    return Contender("Ray Data", python_peer("ray-data", **words), {}, "Ray Data", lasting=False)


def _torch(files: FileSet) -> tuple[str, ...]:
    return python_peer("torch", files=files.listing, batch_size=batch_size(files))


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
