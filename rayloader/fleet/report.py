"""What an epoch of a Fleet was: figures per rank and of all ranks, and what happened."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

from rayloader.config import Options
from rayloader.errors import counted
from rayloader.experiment.grid import Grid
from rayloader.experiment.limit import Evidence, Limit, limit_of
from rayloader.fleet.epoch import Outcome
from rayloader.fleet.work import Part

GB = 1e9
_MASK = (1 << 64) - 1
_COLUMNS = (
    "rank", "<node", "pid", "files", "GB", "GB/s", "files/s", "first\nms", "stall\ns",
    "in flight\npeak mean", "p50\nms", "p99\nms", "CPU s\nreader", "CPU s\nconsumer",
)  # fmt: skip
_SUMS = (
    "steps", "files", "bytes", "bytes_transferred", "reads", "stall_seconds", "restarts", "retries",
    "throttled", "cpu_reader", "metadata_ops", "direct_bytes", "cache_dropped_files",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class RankReport:
    """What one rank did in an epoch, in one part or, when the ranks changed, in several.

    Attributes:
        rank: which.
        parts: in the order in which they ended.
    """

    rank: int
    parts: tuple[Part, ...]

    @property
    def receipts(self) -> list[dict[str, Any]]:
        """Of every iteration, by the names of :class:`~rayloader.receipt.Receipt`'s fields."""
        return [receipt for part in self.parts for receipt in part.receipts]

    @property
    def pids(self) -> tuple[int, ...]:
        """Processes of its consumers, each once."""
        return tuple(dict.fromkeys(part.hello.pid for part in self.parts))

    @property
    def reader_pids(self) -> tuple[int, ...]:
        """Processes of its readers, each once."""
        return tuple(dict.fromkeys(one["reader_pid"] for one in self.receipts))

    @property
    def host(self) -> str:
        """The node of its last consumer."""
        return self.parts[-1].hello.host

    @property
    def seconds(self) -> float:
        """How long it read, all parts together [s]."""
        return sum(part.ended_at - part.began_at for part in self.parts)

    @property
    def first_batch_seconds(self) -> float:
        """From its start to its first batch [s]."""
        return self.parts[0].first_at - self.parts[0].began_at

    @property
    def cpu_consumer(self) -> float:
        """CPU time of its consumer [s]."""
        return sum(part.cpu_seconds for part in self.parts)

    def total(self, name: str) -> Any:
        """Sum of a field of its receipts."""
        return sum(one[name] for one in self.receipts)

    @property
    def peak_in_flight(self) -> int:
        """The most reads in flight at once [reads]."""
        return max((one["peak_in_flight"] for one in self.receipts), default=0)

    @property
    def mean_in_flight(self) -> float:
        """Reads in flight on average while it read [reads]."""
        return _weighted(self.receipts, "mean_in_flight", "seconds")

    @property
    def latency_p50(self) -> float:
        """Median duration of a read; of several parts the mean, by their reads [s]."""
        return _weighted(self.receipts, "latency_p50", "reads")

    @property
    def latency_p99(self) -> float:
        """99 of 100 reads were not slower, in the slowest part [s]."""
        return max((one["latency_p99"] for one in self.receipts), default=0.0)

    def asdict(self) -> dict[str, Any]:
        """Its figures, and every receipt."""
        return {
            "rank": self.rank,
            "host": self.host,
            "pids": list(self.pids),
            "reader_pids": list(self.reader_pids),
            "seconds": self.seconds,
            "first_batch_seconds": self.first_batch_seconds,
            "cpu_consumer": self.cpu_consumer,
            "peak_in_flight": self.peak_in_flight,
            "mean_in_flight": self.mean_in_flight,
            "latency_p50": self.latency_p50,
            "latency_p99": self.latency_p99,
            **{name: self.total(name) for name in _SUMS},
            "receipts": self.receipts,
        }


@dataclasses.dataclass(frozen=True, repr=False)
class EpochReport:
    """What an epoch of a Fleet was. Shows itself as a table, in a notebook too.

    Attributes:
        outcome: what the ranks said.
        options: of every rank.
        compute_seconds: the training step that was imitated, per batch [s].
        latency_alone: of reads one at a time; ``None``: not measured, because the storage was not
            what was waited for [s].
    """

    outcome: Outcome
    options: Options
    compute_seconds: float = 0.0
    latency_alone: float | None = None

    @property
    def epoch(self) -> int:
        """Its number."""
        return self.outcome.epoch

    @property
    def events(self) -> tuple[str, ...]:
        """What was not to be expected, and changes of the ranks; a line each."""
        return self.outcome.events

    @functools.cached_property
    def ranks(self) -> tuple[RankReport, ...]:
        """Every rank that read, in order."""
        numbers = sorted({part.rank for part in self.outcome.parts})
        return tuple(
            RankReport(rank, tuple(part for part in self.outcome.parts if part.rank == rank))
            for rank in numbers
        )

    @property
    def seconds(self) -> float:
        """From the first rank's start to the last one's end [s].

        On one node by its own clock; over several by the driver's, which includes a message.
        """
        parts = self.outcome.parts
        if len({part.hello.node_id for part in parts}) > 1 or not parts:
            return self.outcome.seconds
        return max(part.ended_at for part in parts) - min(part.began_at for part in parts)

    @property
    def steps(self) -> int:
        """Batches of all ranks [batches]."""
        return int(self.total("steps"))

    @property
    def files(self) -> int:
        """Samples read on all ranks [samples]."""
        return int(self.total("files"))

    @property
    def bytes(self) -> int:
        """Their sizes [bytes]."""
        return int(self.total("bytes"))

    @property
    def bytes_per_second(self) -> float:
        """Of all ranks together [bytes/s]."""
        return self.bytes / self.seconds if self.seconds else 0.0

    @property
    def files_per_second(self) -> float:
        """Of all ranks together [samples/s]."""
        return self.files / self.seconds if self.seconds else 0.0

    @property
    def stall_share(self) -> float:
        """Of the consumers' time, what they spent waiting for batches [0..1]."""
        seconds = sum(one["seconds"] for rank in self.ranks for one in rank.receipts)
        return self.total("stall_seconds") / seconds if seconds else 0.0

    @property
    def latency_p50(self) -> float:
        """Mean of the ranks' medians, by their reads [s]."""
        receipts = [one for rank in self.ranks for one in rank.receipts]
        return _weighted(receipts, "latency_p50", "reads")

    @property
    def latency_p99(self) -> float:
        """Of the slowest rank [s]."""
        return max((rank.latency_p99 for rank in self.ranks), default=0.0)

    @property
    def peak_in_flight(self) -> int:
        """Sum of the ranks' peaks [reads]."""
        return sum(rank.peak_in_flight for rank in self.ranks)

    @property
    def read_hash(self) -> str:
        """Of all names read, in any order: equal for epochs that have read the same."""
        content = sum(int(one["read_hash"] or "0", 16) for r in self.ranks for one in r.receipts)
        return f"{content & _MASK:016x}"

    @property
    def evidence(self) -> Evidence:
        """What tells which limit it was."""
        receipts = [one for rank in self.ranks for one in rank.receipts]
        parts, options = self.outcome.parts, self.options
        seconds = sum(one["seconds"] for one in receipts) or 1e-9
        cpus = sum({part.hello.node_id: part.hello.cpus for part in parts}.values()) or 1
        cpu = self.total("cpu_reader") + sum(part.cpu_seconds for part in parts)
        in_flight = _weighted(receipts, "mean_in_flight", "seconds")
        concurrency = max((one["concurrency"] for one in receipts), default=options.concurrency)
        ahead, reads = options.read_ahead_batches, self.total("reads") or 1
        return Evidence(
            wait_share=self.stall_share,
            compute_share=self.compute_seconds * self.steps / seconds,
            cpu_share=cpu / (self.seconds * cpus) if self.seconds else 0.0,
            node_busy=max((part.node_busy for part in parts), default=0.0),
            reader_cores=max(
                (rank.total("cpu_reader") / rank.seconds for rank in self.ranks if rank.seconds),
                default=0.0,
            ),
            python_engine=any(one["engine"] == "python" for one in receipts),
            occupancy=in_flight / concurrency,
            concurrency=concurrency,
            latency=self.latency_p50,
            latency_alone=self.latency_alone,
            read_bytes=self.total("bytes_transferred") / reads,
            memory_bytes=min((one["memory_bytes"] for one in receipts), default=1),
            in_flight=in_flight,
            read_ahead=None if ahead is None else ahead * options.batch_size,
            throttled_share=self.total("throttled") / reads,
            files_per_rank=self.files / max(len(self.ranks), 1),
        )

    @property
    def limit(self) -> Limit:
        """What bounded it, and how that is known."""
        return limit_of(self.evidence)

    def total(self, name: str) -> Any:
        """Sum of a field of all receipts."""
        return sum(rank.total(name) for rank in self.ranks)

    def asdict(self) -> dict[str, Any]:
        """Everything in plain types, for JSON."""
        return {
            "epoch": self.epoch,
            "world_size": max((part.world_size for part in self.outcome.parts), default=0),
            "seconds": self.seconds,
            "bytes_per_second": self.bytes_per_second,
            "files_per_second": self.files_per_second,
            "stall_share": self.stall_share,
            "peak_in_flight": self.peak_in_flight,
            "latency_p50": self.latency_p50,
            "latency_p99": self.latency_p99,
            "read_hash": self.read_hash,
            "compute_seconds": self.compute_seconds,
            "cpu_consumer": sum(rank.cpu_consumer for rank in self.ranks),
            **{name: self.total(name) for name in _SUMS},
            "limit": self.limit.asdict(),
            "evidence": dataclasses.asdict(self.evidence),
            "events": list(self.events),
            "ranks": [rank.asdict() for rank in self.ranks],
        }

    def grid(self) -> Grid:
        """The table: a row per rank, one for all, and what happened."""
        rows = [_row(rank) for rank in self.ranks]
        total = (
            "all", "", "", f"{self.files:,}", _gb(self.bytes),
            _gb(self.bytes_per_second), f"{self.files_per_second:,.0f}",
            _ms(max((rank.first_batch_seconds for rank in self.ranks), default=0.0)),
            f"{self.total('stall_seconds'):.2f}", f"{self.peak_in_flight}      ",
            _ms(self.latency_p50), _ms(self.latency_p99), f"{self.total('cpu_reader'):.2f}",
            f"{sum(rank.cpu_consumer for rank in self.ranks):.2f}",
        )  # fmt: skip
        return Grid(
            f"epoch {self.epoch}: {counted(self.files, 'file')}, {_gb(self.bytes)} GB in "
            f"{self.seconds:.2f} s: {_gb(self.bytes_per_second)} GB/s",
            _COLUMNS,
            (*rows, total),
            frozenset([len(rows)]),
            (str(self.limit), *self.events),
        )

    def __repr__(self) -> str:
        return (
            f"EpochReport(epoch {self.epoch}, {counted(len(self.ranks), 'rank')}, "
            f"{counted(self.files, 'file')}, "
            f"{_gb(self.bytes_per_second)} GB/s, {self.files_per_second:,.0f} files/s)"
        )

    def __str__(self) -> str:
        return self.grid().text()

    def _repr_html_(self) -> str:
        return self.grid().html()


def _row(rank: RankReport) -> tuple[str, ...]:
    seconds = rank.seconds or 1.0
    return (
        str(rank.rank),
        rank.host,
        "→".join(map(str, rank.pids)),
        f"{rank.total('files'):,}",
        _gb(rank.total("bytes")),
        _gb(rank.total("bytes") / seconds),
        f"{rank.total('files') / seconds:,.0f}",
        _ms(rank.first_batch_seconds),
        f"{rank.total('stall_seconds'):.2f}",
        f"{rank.peak_in_flight} {rank.mean_in_flight:5.1f}",
        _ms(rank.latency_p50),
        _ms(rank.latency_p99),
        f"{rank.total('cpu_reader'):.2f}",
        f"{rank.cpu_consumer:.2f}",
    )


def _weighted(receipts: Iterable[dict[str, Any]], name: str, by: str) -> float:
    """Mean of a field, each receipt counting as much as its field ``by``."""
    pairs = [(one[name], one[by]) for one in receipts]
    weight = sum(pair[1] for pair in pairs)
    return float(sum(value * part for value, part in pairs) / weight) if weight else 0.0


def _ms(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _gb(amount: float) -> str:
    value = amount / GB
    return f"{value:.2f}" if value >= 0.995 or not value else f"{value:.3g}"
