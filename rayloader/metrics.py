"""A reader's figures for Ray's metrics: Prometheus, Grafana and Ray's dashboard show them.

Every few seconds a thread of the reader's process asks the reader for its :class:`Figures` and
tells Ray what has changed; nothing is done per read or batch. Ray's agent on the node exports what
it is told, with ``ray_`` before each name (``ray_rayloader_read_bytes_total``). A Ray without
agents, or with its metrics off, has nobody to tell.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rayloader.reader import Figures
from rayloader.storage import LATENCY_BUCKETS, Counters

TAGS = ("rank", "run", "storage")
"""Labels of every metric: the rank, its run (the launcher's name for it, or Ray's job), and the
scheme of what it reads."""
COUNTERS = {
    "rayloader_read_bytes_total": "Bytes that came from the storage.",
    "rayloader_reads_total": "Read requests completed.",
    "rayloader_read_seconds_total": "Their durations; its rate is the mean number in flight.",
    "rayloader_metadata_operations_total": "Opens, stats and HEADs.",
    "rayloader_retries_total": "Requests that were sent again.",
    "rayloader_throttled_total": 'Calls that the storage answered with "slow down".',
    "rayloader_reader_cpu_seconds_total": "CPU time of the reader's process.",
    "rayloader_files_total": "Samples delivered to the trainer, or read and dropped.",
    "rayloader_delivered_bytes_total": "Their sizes.",
    "rayloader_batches_total": "Batches delivered.",
    "rayloader_stall_seconds_total": "The trainer's time spent waiting for batches.",
    "rayloader_skipped_files_total": 'Samples left out under on_error="skip".',
    "rayloader_restarts_total": "Readers that were started again.",
    "rayloader_errors_total": "Epochs that ended with an error.",
}
"""Name → what it counts."""
LATENCY = "rayloader_read_latency_seconds_bucket_total"
"""The buckets of a Prometheus histogram. Ray's own ``Histogram`` takes one call for each read, and
repeats each in its agent."""
LATENCY_TEXT = "Reads that took no longer than the label `le` says, in seconds."
GAUGES = {
    "rayloader_reads_in_flight": "Reads in flight now.",
    "rayloader_concurrency": "Ceiling on reads in flight.",
    "rayloader_oldest_read_seconds": "Age of the read that has been in flight for longest.",
    "rayloader_epoch": "Number of the epoch that is read, or was last.",
}
"""Name → what it is."""
_EDGES = range(23, LATENCY_BUCKETS, 4)
"""Of the storage's latency buckets, the last one within 64 µs, 128 µs … 2^31 µs."""


def wanted(environ: Mapping[str, str]) -> bool:
    """Whether the Ray of a process with this environment collects metrics at all."""
    return environ.get("RAY_enable_metrics_collection", "1").lower() not in ("0", "false")


def publish_regularly(
    run: str, ask: Callable[[], Figures | None], seconds: float, stopped: Callable[[float], bool]
) -> None:
    """Publish until told to stop.

    Args:
        run: the name of the run.
        ask: for the reader's figures; ``None``: it has none yet.
        seconds: between two times [s].
        stopped: waits so many seconds, or until it is True.
    """
    publisher = Publisher(run)
    while not stopped(seconds):
        if (figures := ask()) is not None:
            publisher.publish(figures)


class Publisher:
    """Tells Ray what has changed in a reader's figures."""

    def __init__(self, run: str) -> None:
        """Make the metrics, in a process that has joined Ray."""
        from ray.util.metrics import Counter, Gauge

        self._run = run
        self._counters = {name: Counter(name, text, TAGS) for name, text in COUNTERS.items()}
        self._gauges = {name: Gauge(name, text, TAGS) for name, text in GAUGES.items()}
        self._latency = Counter(LATENCY, LATENCY_TEXT, (*TAGS, "le"))
        self._before = Counters()
        self._cpu_before = 0.0
        self._known: set[tuple[str, ...]] = set()

    def publish(self, figures: Figures) -> None:
        """Add what has come since the last call to the counters, and set the gauges."""
        tags = dict(zip(TAGS, (str(figures.rank), self._run, figures.storage), strict=True))
        cpu = time.process_time()
        for name, value in _increments(self._before, figures, cpu - self._cpu_before).items():
            self._add(self._counters[name], value, tags)
        for edge, reads in latency_counts(self._before.latency, figures.counters.latency).items():
            self._add(self._latency, reads, {**tags, "le": edge})
        for name, value in _levels(figures).items():
            self._gauges[name].set(value, tags)
        self._before, self._cpu_before = figures.counters, cpu

    def _add(self, counter: Any, value: float, tags: dict[str, str]) -> None:
        if value > 0:
            counter.inc(value, tags)
            return
        series = (counter.info["name"], *tags.values())
        if series not in self._known:
            # Prometheus sees an increase only of what it has seen before. Of Ray 2.60's public
            # methods none begins a counter at zero: inc() refuses 0, and nothing else records.
            counter._record(0.0, tags)
            self._known.add(series)


def latency_counts(before: Sequence[int], now: Sequence[int]) -> dict[str, int]:
    """Reads that came between, by the longest that they may have taken: label ``le`` → reads."""
    counts, reads = {}, 0
    for bucket, (earlier, later) in enumerate(zip(before, now, strict=True)):
        reads += later - earlier
        if bucket in _EDGES:
            edge = math.inf if bucket == _EDGES[-1] else 2.0 ** ((bucket + 1) / 4) * 1e-6
            counts["+Inf" if edge == math.inf else f"{edge:g}"] = reads
    return counts


def _increments(before: Counters, figures: Figures, cpu: float) -> dict[str, float]:
    now, tally = figures.counters, figures.tally
    return {
        "rayloader_read_bytes_total": now.bytes_transferred - before.bytes_transferred,
        "rayloader_reads_total": now.reads - before.reads,
        "rayloader_read_seconds_total": now.read_seconds - before.read_seconds,
        "rayloader_metadata_operations_total": now.metadata_ops - before.metadata_ops,
        "rayloader_retries_total": now.retries - before.retries,
        "rayloader_throttled_total": now.throttled - before.throttled,
        "rayloader_reader_cpu_seconds_total": cpu,
        "rayloader_files_total": tally.files,
        "rayloader_delivered_bytes_total": tally.bytes,
        "rayloader_batches_total": tally.batches,
        "rayloader_stall_seconds_total": tally.stall_ns / 1e9,
        "rayloader_skipped_files_total": tally.skipped,
        "rayloader_restarts_total": tally.restarts,
        "rayloader_errors_total": tally.errors,
    }


def _levels(figures: Figures) -> dict[str, float]:
    return {
        "rayloader_reads_in_flight": figures.counters.in_flight,
        "rayloader_concurrency": figures.concurrency,
        "rayloader_oldest_read_seconds": figures.oldest_seconds,
        "rayloader_epoch": figures.epoch,
    }
