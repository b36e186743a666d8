"""What ``rayloader read`` found, as tables for people and as a document for programs."""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import multiprocessing
import os
import platform
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from rayloader import __version__
from rayloader.config import MIB, Options
from rayloader.errors import counted, printable
from rayloader.experiment.grid import Fitted, plain_table
from rayloader.experiment.pagecache import HOT
from rayloader.experiment.ranks import Loader
from rayloader.experiment.read import EpochResult, LoaderResult, ReadJob, ReadResult

GB = 1e9
_LEFT_OUT = 5
"""Samples named that were left out; the others are counted [samples]."""
_PACKAGES = ("ray", "torch", "pyarrow", "numpy")
_COLUMNS = (
    "epoch", "rank", "files", "GB", "GB/s", "files/s", "first\nms", "gap\nms", "stall\ns",
    "in flight\npeak mean", "p50\nms", "p99\nms", "re-\nstarts", "skip-\nped",
)  # fmt: skip
_SPARE = ("re-\nstarts", "skip-\nped")
"""Columns that a narrow terminal does without where nothing happened."""


def title(loader: Loader, job: ReadJob) -> str:
    """What a loader is called in front of people."""
    return {
        "rayloader": "rayloader",
        "torch-kept": f"torch DataLoader, {counted(job.workers, 'worker')} kept",
        "torch-respawned": f"torch DataLoader, {counted(job.workers, 'worker')} respawned",
        "torch-in-process": "torch DataLoader, no workers",
    }[loader]


def parts(result: ReadResult) -> Iterator[RenderableType]:
    """What a person is shown, piece by piece."""
    yield Text(f"\n{heading(result)}\n", style="bold")
    yield ranks_table(result.loaders[0])
    yield Text(f"\n{legend(result)}")
    if left_out := skipped(result.loaders[0]):
        yield Text("\n" + "\n".join(left_out))
    whole = result.comparable
    if len(whole.loaders) > 1:
        yield Text("\nside by side\n", style="bold")
        yield comparison_table(whole)
        yield Text(f"\n{comparison_legend(whole)}")


def ranks_table(result: LoaderResult) -> Fitted:
    """A line per epoch and rank, and one per epoch for all ranks together."""
    table = plain_table()
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for epoch in result.epochs:
        for done in epoch.ranks:
            table.add_row(*_rank_row(done.receipt, first=done is epoch.ranks[0]))
        if len(epoch.ranks) > 1:
            table.add_row(*_total_row(epoch), style="bold")
        table.add_section()
    return Fitted(table, keys=2, spare=_SPARE)


def comparison_table(result: ReadResult) -> Fitted:
    """Every loader's later epochs, their median, and its first epoch."""
    table = plain_table()
    table.add_column("")
    for name in (
        "GB/s", "files/s", "first\nms", "gap\nms", "processes\nstarted", "rayloader is\nfaster by",
    ):  # fmt: skip
        table.add_column(name, justify="right", no_wrap=True)
    later = result.loaders[0].later
    if later:
        table.add_row(f"epochs {later[0].epoch} to {later[-1].epoch}, median", style="bold")
        _compare(table, result, [loader.later for loader in result.loaders])
    table.add_row("epoch 0", style="bold")
    _compare(table, result, [loader.epochs[:1] for loader in result.loaders])
    return Fitted(table, keys=1)


def _compare(table: Table, result: ReadResult, each: Sequence[tuple[EpochResult, ...]]) -> None:
    """Add a line per loader: the median of its epochs."""
    ours = median(each[0], lambda epoch: epoch.bytes / epoch.seconds)
    for loader, epochs in zip(result.loaders, each, strict=True):
        rate = median(epochs, lambda epoch: epoch.bytes / epoch.seconds)
        table.add_row(
            f"  {title(loader.loader, result.job)}",
            _rate(rate),
            _count(median(epochs, lambda epoch: epoch.files / epoch.seconds)),
            _milliseconds(median(epochs, lambda epoch: epoch.first_batch_seconds)),
            _gap(median(epochs, lambda epoch: epoch.gap_seconds), epochs[0].epoch),
            _count(median(epochs, lambda epoch: epoch.processes_started)),
            "" if epochs is each[0] else f"{ours / rate:.1f} x",
        )


def heading(result: ReadResult) -> str:
    """What was read and how, in a line."""
    job = result.job
    how = [
        counted(len(result.catalog), "file"),
        f"{counted(job.ranks, 'rank')} x batch {job.options.batch_size}",
        *(["nothing delivered"] if not job.options.deliver else []),
        *(["every byte looked at"] if job.touch else []),
        *([f"{job.compute_seconds * 1e3:g} ms compute per batch"] if job.compute_seconds else []),
    ]
    if result.interrupted:
        done = sum(len(loader.epochs) for loader in result.loaders)
        all_ = counted(job.epochs * len(job.loaders), "epoch")
        how.insert(0, f"INTERRUPTED after {done} of {all_}")
    return f"rayloader {__version__}: " + ", ".join(how)


def legend(result: ReadResult) -> str:
    """How rayloader's figures came about: what all ranks have in common; what columns mean."""
    ours, options = result.loaders[0], result.job.options
    receipts = [done.receipt for epoch in ours.epochs for done in epoch.ranks]
    engines = " and ".join(sorted({receipt["engine"] for receipt in receipts}))
    channels = " and ".join(sorted({receipt["channel"] for receipt in receipts}))
    memory = min(receipt["memory_bytes"] for receipt in receipts)
    return (
        f"Engine {engines}, channel {channels}, concurrency {options.concurrency}, "
        f"{memory / MIB:,.0f} MiB per rank.\n"
        f"Before epoch 0: {result.list_seconds:.1f} s to list the files, "
        f"{ours.start_seconds:.1f} s to start Ray and the readers.\n"
        f"In the page cache before epoch 0: {cached(ours.cached)}{_around(options)}. "
        "GB = 10^9 bytes.\n"
        "first: epoch's start to first batch. gap: end of the epoch before to first batch.\n"
        "stall: waiting for batches. p50, p99: duration of a read.\n"
        "all: what all ranks read / (last rank's end - common start)."
        f"{_few_in_flight(ours, options)}"
    )


def _few_in_flight(ours: LoaderResult, options: Options) -> str:
    """Why cached files never come near the ceiling, where that is to be seen."""
    peak = max(done.receipt["peak_in_flight"] for epoch in ours.epochs for done in epoch.ranks)
    around = options.direct or options.drop_cache
    if around or (ours.cached or 0) < HOT or peak > options.concurrency / 2:
        return ""
    return "\nReads that return at once, from the page cache, need few in flight."


def _around(options: Options) -> str:
    """What is done about the page cache, if anything."""
    if options.direct:
        return "; read around it (O_DIRECT)"
    return "; each file dropped from it before it is read" if options.drop_cache else ""


def skipped(result: LoaderResult) -> list[str]:
    """The first few samples that were left out, a line each, and how many more there are."""
    lines = [
        f"left out: {printable(skip['key'])}: {skip['cause']} "
        f"(epoch {done.epoch}, rank {done.receipt['rank']})"
        for epoch in result.epochs
        for done in epoch.ranks
        for skip in done.receipt["skipped"]
    ]
    more = [f"and {len(lines) - _LEFT_OUT:,} more"] if len(lines) > _LEFT_OUT else []
    return lines[:_LEFT_OUT] + more


def comparison_legend(result: ReadResult) -> str:
    """How the figures came about that are compared."""
    job, states = result.job, [cached(loader.cached) for loader in result.loaders]
    start = job.worker_start or multiprocessing.get_start_method()
    return (
        "The same files, order, ranks and batches, one loader after the other.\n"
        f"In the page cache before each: {', '.join(states)}. "
        f"Workers per rank: {job.workers}, started by {start}.\n"
        "torch DataLoader: a map-style data set of whole files, batched by the same plan; its\n"
        "collate_fn lays a batch of a worker in one piece of shared memory, and pads nothing."
    )


def median(epochs: Sequence[EpochResult], of: Callable[[EpochResult], float]) -> float:
    """The median of a figure over epochs; there must be one."""
    return statistics.median(of(epoch) for epoch in epochs)


def document(result: ReadResult, command: Sequence[str]) -> dict[str, Any]:
    """Everything, in plain types: environment, options, and every receipt by its field names."""
    job, catalog = result.job, result.catalog
    return {
        "environment": environment(),
        "command": list(command),
        "interrupted": result.interrupted,
        "options": {
            "ranks": job.ranks,
            "epochs": job.epochs,
            "compute_seconds": job.compute_seconds,
            "touch": job.touch,
            "workers": job.workers,
            "worker_start": job.worker_start,
            **job.options.asdict(),
        },
        "catalog": {
            "root": os.fsdecode(catalog.root),
            "entries": len(catalog),
            "digest": catalog.digest,
            "list_seconds": result.list_seconds,
        },
        "loaders": [loader.asdict() for loader in result.loaders],
    }


def environment() -> dict[str, Any]:
    """Versions, and the machine as far as figures depend on it."""
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "rayloader": __version__,
        "python": platform.python_version(),
        **{name: version(name) for name in _PACKAGES},
        "engine": "native" if _has_native() else "python",
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpu_count": os.cpu_count(),
        "cpus_allowed": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def _has_native() -> bool:
    return importlib.util.find_spec("rayloader.storage._native") is not None


def version(package: str) -> str | None:
    """The installed version of a package; ``None`` if there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def epoch_line(epoch: EpochResult) -> str:
    """One epoch on all ranks, in a line."""
    return (
        f"epoch {epoch.epoch}: {counted(epoch.files, 'file')}, {epoch.bytes / GB:.2f} GB in "
        f"{epoch.seconds:.2f} s: {epoch.bytes / epoch.seconds / GB:.2f} GB/s, "
        f"{epoch.files / epoch.seconds:,.0f} files/s"
    )


def cached(share: float | None) -> str:
    """The state of the page cache, in words."""
    return "unknown" if share is None else f"{share:.0%}"


def _rank_row(receipt: dict[str, Any], first: bool) -> list[str]:
    seconds = receipt["seconds"] or float("inf")
    return [
        str(receipt["epoch"]) if first else "",
        str(receipt["rank"]),
        _count(receipt["files"]),
        f"{receipt['bytes'] / GB:.2f}",
        _rate(receipt["bytes"] / seconds),
        _count(receipt["files"] / seconds),
        _milliseconds(receipt["first_batch_seconds"]),
        _gap(receipt["gap_seconds"], receipt["epoch"]),
        f"{receipt['stall_seconds']:.2f}",
        f"{receipt['peak_in_flight']} {receipt['mean_in_flight']:.1f}".rjust(9),
        f"{receipt['latency_p50'] * 1e3:.2f}",
        f"{receipt['latency_p99'] * 1e3:.2f}",
        _count(receipt["restarts"]),
        _count(len(receipt["skipped"])),
    ]


def _total_row(epoch: EpochResult) -> list[str]:
    receipts = [done.receipt for done in epoch.ranks]
    return [
        "",
        "all",
        _count(epoch.files),
        f"{epoch.bytes / GB:.2f}",
        _rate(epoch.bytes / epoch.seconds),
        _count(epoch.files / epoch.seconds),
        _milliseconds(epoch.first_batch_seconds),
        _gap(epoch.gap_seconds, epoch.epoch),
        *[""] * 4,
        _count(sum(receipt["restarts"] for receipt in receipts)),
        _count(sum(len(receipt["skipped"]) for receipt in receipts)),
    ]


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _rate(value: float) -> str:
    return f"{value / GB:.2f}"


def _milliseconds(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _gap(seconds: float, epoch: int) -> str:
    return _milliseconds(seconds) if epoch else "-"
