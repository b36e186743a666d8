"""What bounded a run, by name, and how that is known.

A pure function of figures, so that a report that is drawn again names the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

Name: TypeAlias = Literal[
    "consumer", "storage throttles", "client CPU", "GIL", "storage latency", "storage bandwidth",
    "storage", "memory bound", "read-ahead bound", "unclear",
]  # fmt: skip

WAITING = 0.2
"""Consumers that wait for less of their time than this bound the run themselves [0..1]."""
THROTTLED = 0.01
"""Answers of "slow down" per read that matter [0..1]."""
CPU_FULL = 0.7
"""CPU time of readers and consumers, of all that their nodes have, that bounds a run [0..1]."""
CPU_SHARED = 0.35
"""The same where others keep the nodes busy [0..1]."""
NODE_BUSY = 0.9
"""A node of which so much is busy has no CPU left [0..1]."""
ONE_CORE = 0.7
"""A Python engine that computes for so much of the time is bound by its one lock [cores]."""
WINDOW_FULL = 0.5
"""Reads in flight on average, of the ceiling, from which on the storage is what is waited for."""
QUEUED = 2.0
"""A read that takes so many times what it takes alone waits in a queue: more do not help. One that
takes so much longer alone was answered by something else."""
MEMORY_FULL = 0.3
"""Bytes in flight on average, of the bound, from which on memory is what is waited for [0..1]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evidence:
    """Figures of a run, of all ranks together unless it says otherwise."""

    wait_share: float
    """Of the consumers' time, what they waited for batches [0..1]."""
    compute_share: float
    """Of the consumers' time, the training step that was imitated [0..1]."""
    cpu_share: float
    """CPU time of readers and consumers, of what their nodes' CPUs have [0..1]."""
    node_busy: float
    """Of the nodes' CPUs, what anybody used, the busiest node [0..1]."""
    reader_cores: float
    """CPU time of a reader per second, the busiest [cores]."""
    python_engine: bool
    """The engine was the one in Python."""
    occupancy: float
    """Reads in flight on average, of the ceiling [0..1]."""
    concurrency: int
    """The ceiling, per rank [reads]."""
    latency: float
    """Median duration of a read [s]."""
    latency_alone: float | None
    """The same of reads one at a time that no page cache answers; ``None``: not measured [s]."""
    read_bytes: float
    """Mean size of a read [bytes]."""
    memory_bytes: int
    """The bound on batches in memory, per rank [bytes]."""
    in_flight: float
    """Reads in flight on average, per rank [reads]."""
    read_ahead: int | None
    """The bound on samples read ahead, per rank; ``None``: as memory allows [samples]."""
    throttled_share: float
    """Answers of "slow down" per read."""
    files_per_rank: float
    """Samples of a rank [samples]."""

    @property
    def waits_for_storage(self) -> bool:
        """True where only a read alone can tell which property of the storage it was."""
        return limit_of(self).name in ("storage", "storage latency", "storage bandwidth")


@dataclasses.dataclass(frozen=True)
class Limit:
    """What bounded a run.

    Attributes:
        name: one of a few.
        because: why it is thought to be that, with the figures, in a sentence.
        advice: what would change it.
    """

    name: Name
    because: str
    advice: str

    def __str__(self) -> str:
        return f"limit: {self.name}: {self.because}. {self.advice}."

    def asdict(self) -> dict[str, Any]:
        """Its parts by name."""
        return dataclasses.asdict(self)


def limit_of(seen: Evidence) -> Limit:
    """The first that fits of what can bound a run, from the consumer down to the storage."""
    return next(_found(seen))


def _found(seen: Evidence) -> Iterator[Limit]:
    yield from _above_the_reader(seen)
    yield from _on_the_client(seen)
    if seen.occupancy >= WINDOW_FULL:
        yield _storage(seen)
    yield from _window(seen)
    yield from _crowded(seen)
    yield Limit(
        "unclear",
        f"consumers waited {seen.wait_share:.0%} of their time, CPUs were {seen.cpu_share:.0%} "
        f"used by this run, and {seen.in_flight:.1f} of {seen.concurrency} reads were in flight",
        "A longer epoch says more"
        if seen.files_per_rank < 4 * seen.concurrency
        else "Look at the ranks one by one",
    )


def _above_the_reader(seen: Evidence) -> Iterator[Limit]:
    if seen.wait_share < WAITING:
        step = f", {seen.compute_share:.0%} in the training step" if seen.compute_share else ""
        yield Limit(
            "consumer",
            f"it waited for batches only {seen.wait_share:.0%} of its time{step}",
            "Reading faster changes nothing; more ranks do",
        )
    if seen.throttled_share > THROTTLED:
        yield Limit(
            "storage throttles",
            f'it answered {seen.throttled_share:.1%} of the requests with "slow down"',
            "Lower concurrency or fewer ranks, or a larger quota",
        )


def _on_the_client(seen: Evidence) -> Iterator[Limit]:
    others = seen.node_busy >= NODE_BUSY and seen.cpu_share >= CPU_SHARED
    if seen.python_engine and seen.reader_cores >= ONE_CORE and seen.cpu_share < CPU_FULL:
        yield Limit(
            "GIL",
            f"a reader of the Python engine computed on {seen.reader_cores:.2f} cores, while this "
            f"run used {seen.cpu_share:.0%} of the CPUs",
            "The C engine (engine='native'), or more ranks",
        )
    if seen.cpu_share >= CPU_FULL or others:
        busy = f"; with other programs they were {seen.node_busy:.0%} busy" if others else ""
        yield Limit(
            "client CPU",
            f"readers and consumers used {seen.cpu_share:.0%} of the CPUs{busy}",
            "More nodes or CPUs; more in flight does not help",
        )


def _storage(seen: Evidence) -> Limit:
    full = f"{seen.in_flight:.1f} of {seen.concurrency} reads were in flight on average"
    now, alone = seen.latency * 1e3, seen.latency_alone
    if alone is None:
        return Limit("storage", f"{full}, taking {now:.2f} ms (median)", "It is waited for")
    times = (
        f"{full}, taking {now:.2f} ms (median); alone a read takes {alone * 1e3:.2f} ms (median)"
    )
    if alone >= QUEUED * seen.latency:
        return Limit(
            "unclear",
            f"{times}: longer than among others, which tells nothing of this storage under load",
            "Reads that a cache answers are compared with a cold one (--cache cold)",
        )
    if seen.latency >= QUEUED * alone:
        return Limit("storage bandwidth", times, "Reads queue there: more in flight does not help")
    return Limit("storage latency", times, "More in flight (concurrency, ranks) helps")


def _window(seen: Evidence) -> Iterator[Limit]:
    ahead = seen.read_ahead
    if ahead is not None and ahead < seen.concurrency and seen.in_flight >= MEMORY_FULL * ahead:
        yield Limit(
            "read-ahead bound",
            f"read_ahead_batches allows {ahead} samples, so {seen.in_flight:.1f} reads were in "
            f"flight where concurrency allows {seen.concurrency}",
            "Raise read_ahead_batches",
        )
    held = seen.in_flight * seen.read_bytes
    if held >= MEMORY_FULL * seen.memory_bytes:
        yield Limit(
            "memory bound",
            f"{seen.in_flight:.1f} reads of {seen.read_bytes / 1e6:.2f} MB in flight, and batches "
            f"that wait, fill memory_bytes={seen.memory_bytes >> 20} MiB; concurrency allows "
            f"{seen.concurrency}",
            "Raise memory_bytes",
        )


def _crowded(seen: Evidence) -> Iterator[Limit]:
    """Last, for a storage that is waited for is told from its reads, on a busy node too."""
    if seen.node_busy >= NODE_BUSY:
        yield Limit(
            "client CPU",
            f"readers and consumers used {seen.cpu_share:.0%} of the CPUs, which other programs "
            f"kept {seen.node_busy:.0%} busy",
            "Stop the other programs and measure again",
        )
