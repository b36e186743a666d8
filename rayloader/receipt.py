"""What an epoch really read: counted where it happened, not derived from what was asked."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_MULTIPLIER = 0x9E3779B97F4A7C15
_ORDER_BASE = 0xD1B54A32D192ED03
_MASK = (1 << 64) - 1

Hashes = npt.NDArray[np.uint64]


class Fingerprint(NamedTuple):
    """A digest of names, composable over batches and ranks.

    ``content`` does not depend on the order (two ranks' contents add up to the epoch's);
    ``order`` does. Both are 64 bits: they find mistakes, not forgers.
    """

    names: int = 0
    content: int = 0
    order: int = 0

    @classmethod
    def of(cls, hashes: Hashes) -> Fingerprint:
        """The fingerprint of names whose :func:`name_hashes` these are, in their order."""
        powers = _powers(_ORDER_BASE, len(hashes))[::-1]
        return cls(len(hashes), int(hashes.sum()), int((hashes * powers).sum()))

    @classmethod
    def of_each(cls, hashes: Hashes, starts: npt.NDArray[np.int64]) -> list[Fingerprint]:
        """The fingerprints of several lists of names, one after the other in ``hashes``.

        Args:
            hashes: uint64 [n], of all names.
            starts: int64 [lists], where each list starts; none is empty.
        """
        counts = np.diff(starts, append=len(hashes))
        after = np.repeat(starts + counts, counts) - np.arange(len(hashes)) - 1
        powers = _powers(_ORDER_BASE, int(counts.max()))[after]
        contents = np.add.reduceat(hashes, starts).tolist()
        orders = np.add.reduceat(hashes * powers, starts).tolist()
        return [cls(*one) for one in zip(counts.tolist(), contents, orders, strict=True)]

    def then(self, later: Fingerprint) -> Fingerprint:
        """The fingerprint of these names followed by ``later``'s."""
        shifted = self.order * _order_power(later.names)
        return Fingerprint(
            self.names + later.names,
            (self.content + later.content) & _MASK,
            (shifted + later.order) & _MASK,
        )


@functools.lru_cache
def _order_power(names: int) -> int:
    return pow(_ORDER_BASE, names, 1 << 64)


def name_hashes(blob: bytes, offsets: npt.NDArray[np.int64]) -> Hashes:
    """A hash of each name, uint64 [n].

    Args:
        blob: all names' bytes behind one another.
        offsets: int64 [n + 1], name i is ``blob[offsets[i]:offsets[i + 1]]``; none is empty.
    """
    if len(offsets) < 2:
        return np.empty(0, np.uint64)
    starts, lengths = offsets[:-1] - offsets[0], np.diff(offsets)
    letters = np.frombuffer(blob, np.uint8)[offsets[0] : offsets[-1]] + np.uint64(1)
    within = np.arange(len(letters)) - np.repeat(starts, lengths)
    powers = _powers(_MULTIPLIER, int(lengths.max()))
    hashes: Hashes = np.add.reduceat(letters * powers[within], starts)
    return _mix(hashes + lengths.astype(np.uint64) * np.uint64(_MULTIPLIER))


_POWERS: dict[int, npt.NDArray[np.uint64]] = {}


def _powers(base: int, count: int) -> npt.NDArray[np.uint64]:
    """uint64 [count]: base to the power 0, 1, 2 … modulo 2^64."""
    known = _POWERS.get(base)
    if known is None or len(known) < count:
        factors = np.full(max(count, 512), base, np.uint64)
        factors[0] = 1
        known = _POWERS[base] = np.multiply.accumulate(factors)
    return known[:count]


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The splitmix64 finaliser: every input bit changes half of the output bits."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class Skipped(NamedTuple):
    """A sample left out under ``on_error="skip"``."""

    key: str
    cause: str


@dataclasses.dataclass(kw_only=True)
class Receipt:
    """What one epoch of one rank read. Readable at any time; complete at the epoch's end.

    Counted in the trainer: files, bytes, steps, hashes, times. Counted in the reader by the
    storage: requests, bytes transferred, in flight, latency, CPU.
    """

    epoch: int = 0
    """Its number."""
    rank: int = 0
    """Whose receipt it is."""
    world_size: int = 1
    """Ranks in the run."""
    steps: int = 0
    """Batches delivered [batches]."""
    steps_expected: int = 0
    """Batches that the epoch has for this rank [batches]."""
    files: int = 0
    """Samples delivered (or, with ``deliver=False``, read and dropped)."""
    bytes: int = 0
    """Their sizes [bytes]."""
    bytes_transferred: int = 0
    """Bytes that came from the storage in this epoch, read-ahead and repeats included [bytes]."""
    seconds: float = 0.0
    """From the first ``next()`` to the end of the iteration, or to now [s]."""
    first_batch_seconds: float = 0.0
    """From the first ``next()`` to its batch [s]."""
    gap_seconds: float = 0.0
    """From the end of the epoch before to this one's first batch [s]; 0 for the first epoch."""
    stall_seconds: float = 0.0
    """The trainer's time spent waiting in ``next()`` [s]."""
    peak_in_flight: int = 0
    """The most reads in flight at once [reads]."""
    mean_in_flight: float = 0.0
    """Reads in flight on average between the first ``next()`` and the epoch's end [reads]."""
    latency_p50: float = 0.0
    """Median duration of a read, to a bucket of 19 % [s]."""
    latency_p99: float = 0.0
    """99 of 100 reads were not slower [s]."""
    reads: int = 0
    """Read requests completed [reads]."""
    metadata_ops: int = 0
    """Opens, stats and HEADs within the clock."""
    restarts: int = 0
    """Readers started again in this epoch."""
    retries: int = 0
    """Requests that the storage layer sent again."""
    throttled: int = 0
    """Calls that the storage answered with "slow down"; one for several objects counts once. The
    reader then sends fewer at once."""
    skipped: list[Skipped] = dataclasses.field(default_factory=list)
    """Samples left out under ``on_error="skip"``: ``key`` and ``cause`` of each."""
    reader_pid: int = 0
    """Process of the reader."""
    engine: str = ""
    """What read: ``native`` or ``python`` files, ``http``, ``obstore`` or ``s3dlio`` objects."""
    channel: str = ""
    """What delivered: ``local`` (shared memory) or ``ray``."""
    bytes_before_clock: int = 0
    """Bytes that came from the storage between the epoch before and this clock [bytes]."""
    metadata_ops_before_clock: int = 0
    """Opens, stats and listings before the clock: of the source too, on the first receipt of the
    rank that listed it [operations]."""
    direct_bytes: int = 0
    """Bytes read with O_DIRECT [bytes]."""
    direct_fallback_files: int = 0
    """Files that wanted O_DIRECT and were read without."""
    cache_dropped_files: int = 0
    """Files dropped from the page cache before they were read."""
    private_copies: int = 0
    """Batches copied out of the arena because the trainer held more than half of it."""
    memory_bytes: int = 0
    """The bound that was in force [bytes]."""
    concurrency: int = 0
    """The ceiling on reads in flight that was in force [reads]."""
    cpu_reader: float = 0.0
    """CPU time of the reader process in this epoch [s]."""
    affinity: list[int] = dataclasses.field(default_factory=list)
    """CPUs that the reader may use."""
    read_hash: str = ""
    """Of the names read, in any order."""
    order_hash: str = ""
    """Of the names read, in the order delivered."""

    def asdict(self) -> dict[str, Any]:
        """Every field by name, in plain types for JSON."""
        values = dataclasses.asdict(self)
        values["skipped"] = [skip._asdict() for skip in self.skipped]
        return values


def latency_quantile(latency: npt.NDArray[np.int64], share: float) -> float:
    """The duration below which a share of the reads lies [s]; 0.0 without reads.

    Args:
        latency: int64 [128], reads by duration as in ``storage.Counters``.
        share: 0 < share <= 1.
    """
    total = int(latency.sum())
    if total == 0:
        return 0.0
    bucket = int(np.searchsorted(np.cumsum(latency), share * total))
    return float(2.0 ** ((bucket + 0.5) / 4)) * 1e-6
