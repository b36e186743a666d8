"""One epoch under way: what has been delivered, and its receipt."""

from __future__ import annotations

import dataclasses
import time

import numpy as np

from rayloader.catalog import Catalog
from rayloader.channel import Delivery
from rayloader.config import Options
from rayloader.plan import EpochPlan, ListPlan, Shard
from rayloader.position import Position
from rayloader.reader import ReaderCounts, Request
from rayloader.receipt import Fingerprint, Receipt, latency_quantile
from rayloader.remote import RemoteReader
from rayloader.storage.uri import is_object, scheme_of


class EpochRun:
    """One epoch under way: what has been delivered, and its receipt."""

    def __init__(
        self,
        at: Position,
        plan: EpochPlan | ListPlan,
        catalog: Catalog | None,
        shard: Shard,
        options: Options,
    ) -> None:
        """Begin at ``at``; the clock starts now."""
        self.at = at
        self.epoch = at.epoch
        self.plan = plan
        self.names = at.files if at.files is not None else catalog
        self.generation = 0
        self.restarts_in_a_row = 0
        self.started_at = time.perf_counter()
        self.ended_at: float | None = None
        self.gap_from: float | None = None
        self.listing_ops = 0
        self.moves = 0
        """How often the user had said what to read next when this began."""
        self._step = at.step
        self._delivered = set(at.delivered)
        self._fingerprint = Fingerprint()
        self._earlier: list[ReaderCounts] = []
        self.receipt = Receipt(
            epoch=self.epoch,
            rank=shard.rank,
            world_size=shard.world_size,
            steps_expected=plan.steps - at.step - len(at.delivered),
            concurrency=options.concurrency,
        )

    def request(self, generation: int, rank: int) -> Request:
        """Ask for everything that has not been delivered."""
        skipped = len(self.receipt.skipped)
        return Request(
            generation, self.epoch, rank, self.plan, self._step, frozenset(self._delivered), skipped
        )

    def rest(self) -> Position:
        """The position now."""
        return dataclasses.replace(self.at, step=self._step, delivered=frozenset(self._delivered))

    def delivered(self, delivery: Delivery) -> None:
        """Count a batch; the position moves before the batch is yielded."""
        receipt = self.receipt
        self._delivered.add(delivery.step)
        while self._step in self._delivered:
            self._delivered.remove(self._step)
            self._step += 1
        if receipt.steps == 0:
            now = time.perf_counter()
            receipt.first_batch_seconds = now - self.started_at
            receipt.gap_seconds = now - self.gap_from if self.gap_from is not None else 0.0
        receipt.steps += 1
        receipt.files += len(delivery.table)
        receipt.bytes += delivery.nbytes
        receipt.private_copies += delivery.private and len(delivery.data) > 0
        receipt.skipped += delivery.skipped
        self._fingerprint = self._fingerprint.then(delivery.names)

    def waited(self, seconds: float) -> None:
        """The trainer spent this long in ``next()`` [s]."""
        self.receipt.stall_seconds += seconds

    def reader_gone(self, counts: ReaderCounts | None) -> None:
        """Keep what a reader had counted when it died."""
        self.receipt.restarts += 1
        if counts is not None and counts.generation == self.generation:
            self._earlier.append(counts)

    def update(self, counts: ReaderCounts | None, remote: RemoteReader) -> None:
        """Bring the receipt up to now."""
        receipt = self.receipt
        ended = self.ended_at if self.ended_at is not None else time.perf_counter()
        receipt.seconds = ended - self.started_at
        receipt.read_hash = f"{self._fingerprint.content:016x}"
        receipt.order_hash = f"{self._fingerprint.order:016x}"
        receipt.reader_pid = remote.welcome["pid"]
        receipt.engine = remote.welcome["engine"]
        if self.names is not None and is_object(self.names.root):
            is_s3 = scheme_of(self.names.root) == b"s3"
            receipt.engine = remote.welcome["client"] if is_s3 else "s3dlio"
        receipt.affinity = remote.welcome["affinity"]
        receipt.channel = remote.name
        receipt.memory_bytes = remote.memory_bytes
        receipt.concurrency = remote.concurrency
        known = [*self._earlier, *([counts] if counts is not None else [])]
        for name in (
            "metadata_ops",
            "reads",
            "bytes_transferred",
            "retries",
            "throttled",
            "direct_bytes",
            "direct_fallback_files",
            "cache_dropped_files",
            "bytes_before_clock",
            "metadata_ops_before_clock",
        ):
            setattr(receipt, name, sum(getattr(count, name) for count in known))
        receipt.metadata_ops_before_clock += self.listing_ops
        receipt.cpu_reader = sum(count.cpu_ns for count in known) / 1e9
        receipt.peak_in_flight = max((count.peak_in_flight for count in known), default=0)
        if receipt.seconds > 0:
            receipt.mean_in_flight = sum(count.read_ns for count in known) / 1e9 / receipt.seconds
        latency = np.sum([count.latency for count in known], axis=0, initial=0)
        receipt.latency_p50 = latency_quantile(latency, 0.50) if known else 0.0
        receipt.latency_p99 = latency_quantile(latency, 0.99) if known else 0.0
