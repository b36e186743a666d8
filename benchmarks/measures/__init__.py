"""The measures, one file each: what is measured, by which method, with which command and peers."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.lineup import Setting
from benchmarks.measures import (
    cold,
    concurrency,
    latency,
    memory,
    one_rank,
    ray_data,
    small_files,
    summed,
    turnover,
    two_ranks,
)
from benchmarks.outcome import Outcome

MEASURES: dict[str, Callable[[Setting], Outcome]] = {
    "one-rank": one_rank.run,
    "summed": summed.run,
    "ray-data": ray_data.run,
    "two-ranks": two_ranks.run,
    "concurrency": concurrency.run,
    "latency": latency.run,
    "cold": cold.run,
    "small-files": small_files.run,
    "turnover": turnover.run,
    "memory": memory.run,
}
"""Name, as ``--only`` takes it → what measures it."""
