"""Who reads what, in which order, in which batches: pure arithmetic.

A plan turns (catalog length, shard, batch size, seed, epoch) into batches of entry indices. It
does no I/O, keeps no list, and gives the same answer on every machine.

*Positions* count the samples of one epoch over all ranks, 0 to N-1. Batch k of rank r of W covers
the positions from ``start + (k * W + r) * B`` on, so the steps of all ranks together walk through
the epoch front to back. That is why a run may stop after any step and go on with another number
of ranks and another batch size: ``position(step)`` is the ``start`` of the new plan. Which *entry*
stands at a position is decided by a keyed permutation of (seed, epoch) alone; it does not
depend on the ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import numbers
from collections.abc import Iterator
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from rayloader.errors import EmptyCatalog, OptionError

Indices = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

ROUNDS = 8
"""Feistel rounds. Four are visibly not uniform."""
SORTED_ENTRIES = 4096
"""Up to this many entries the order is a sort by a keyed hash: exact where Feistel is weakest."""
MAX_ENTRIES = 1 << 62
_FIRST_BLOCK = 1 << 10
_BLOCK = 1 << 14
"""Samples ordered at once [samples]: few at first, because a trainer waits for the first batch."""


class Plan(Protocol):
    """One rank's batches of one epoch. Small, immutable and picklable."""

    @property
    def steps(self) -> int:
        """Batches of this rank [batches]; the same on all ranks."""
        ...

    @property
    def samples(self) -> int:
        """Samples in all batches of this rank [samples]."""
        ...

    def batch(self, step: int) -> Indices:
        """The entry indices of one batch, int64 [samples].

        Raises:
            IndexError: unless 0 <= step < steps.
        """
        ...

    def batches(self, first: int = 0, stop: int | None = None) -> Iterator[Indices]:
        """The batches first, first + 1, … stop - 1, made in blocks.

        Args:
            first: the first step, inclusive.
            stop: the last step, exclusive; ``None``: all.

        Raises:
            IndexError: at the call, unless 0 <= first <= stop <= steps.
        """
        ...

    def position(self, step: int) -> int:
        """The position after ``step`` batches [samples].

        Raises:
            IndexError: unless 0 <= step <= steps.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Shard:
    """Which of how many ranks.

    Raises:
        OptionError: unless 0 <= rank < world_size.
    """

    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        _whole(self, "world_size", least=1)
        _whole(self, "rank", least=0)
        if self.rank >= self.world_size:
            raise OptionError(
                f"rank={self.rank}: ranks of world_size={self.world_size} count from 0 "
                f"to {self.world_size - 1}"
            )


class Permutation:
    """A keyed bijection of the positions 0 … n-1 to the entries 0 … n-1.

    Integer arithmetic only, hence the same on every machine. It takes no memory that grows with
    n beyond ``SORTED_ENTRIES``: a Feistel network over a rectangle of just more than n
    cells, where a value that falls outside is sent through again until it falls inside.

    Args:
        n: the number of entries, >= 0.
        seed: any whole number.
        epoch: any whole number; another one gives an unrelated order.
    """

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        if not 0 <= n <= MAX_ENTRIES:
            raise OptionError(f"n={n}: must be from 0 to {MAX_ENTRIES} entries")
        self.n = n
        self._keys = _round_keys(seed, epoch)
        self._table = _sorted_by_hash(n, self._keys) if n <= SORTED_ENTRIES else None

    def __call__(self, positions: Indices) -> Indices:
        """The entries at some positions, int64, of the same shape.

        Raises:
            IndexError: for a position outside [0, n).
        """
        positions = np.asarray(positions, dtype=np.int64)
        if positions.size and not 0 <= int(positions.min()) <= int(positions.max()) < self.n:
            raise IndexError(f"positions must be from 0 to {self.n - 1}")
        if self._table is not None:
            return self._table[positions]
        values = _walk(positions.ravel().astype(np.uint64), self.n, self._keys)
        return values.astype(np.int64).reshape(positions.shape)


@dataclasses.dataclass(frozen=True)
class EpochPlan:
    """One rank's share of one epoch over a catalog.

    With n samples per rank (the rest of the epoch divided by the ranks, rounded down under
    ``drop`` and up under ``pad``), every rank gets n // B batches of B samples and, unless
    ``drop_last``, one more of the n % B that remain. Under ``pad`` the positions past the end are
    the epoch's first ones again.

    Attributes:
        entries: length of the catalog, N [samples].
        shard: this rank, and how many there are, W.
        batch_size: B [samples].
        epoch: which epoch; decides the order when shuffled.
        seed: of the order; the same on every rank.
        shuffle: ``False``: the catalog's order.
        uneven: what happens to the samples that do not divide by the ranks.
        drop_last: leave out the short last batch.
        start: the position to begin at, from another plan's :meth:`position` [samples].

    Raises:
        OptionError: for a value out of range.
        EmptyCatalog: nothing to read, or under ``drop`` fewer entries than ranks. (A rest, with
            ``start`` > 0, may be shorter than that: it has no steps.)
    """

    entries: int
    shard: Shard
    batch_size: int
    epoch: int = 0
    seed: int = 0
    shuffle: bool = True
    uneven: Literal["drop", "pad"] = "drop"
    drop_last: bool = False
    start: int = 0

    def __post_init__(self) -> None:
        for name, least in (("entries", 0), ("batch_size", 1), ("epoch", 0), ("start", 0)):
            _whole(self, name, least)
        _whole(self, "seed", least=None)
        _check_uneven(self.uneven)
        if self.entries > MAX_ENTRIES:
            raise OptionError(f"entries={self.entries}: must be at most {MAX_ENTRIES}")
        if self.start > self.entries:
            raise OptionError(f"start={self.start}: the epoch ends at position {self.entries}")
        if self.entries == 0:
            raise EmptyCatalog("nothing to read: the catalog has no entries")
        ranks = self.shard.world_size
        if self.uneven == "drop" and self.start == 0 and self.entries < ranks:
            raise EmptyCatalog(
                f"{self.entries} entries are too few for {ranks} ranks under uneven='drop': "
                "each rank needs one; use fewer ranks or uneven='pad'"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @property
    def steps(self) -> int:
        """Batches of this rank [batches]; the same on all ranks."""
        return self._full + (1 if self._tail else 0)

    @property
    def samples(self) -> int:
        """Samples in all batches of this rank [samples]; the same on all ranks."""
        return self._full * self.batch_size + self._tail

    def batch(self, step: int) -> Indices:
        """See :meth:`Plan.batch`."""
        _check_step(step, self.steps)
        return next(self.batches(step, step + 1))

    def batches(self, first: int = 0, stop: int | None = None) -> Iterator[Indices]:
        """See :meth:`Plan.batches`."""
        stop = self.steps if stop is None else stop
        _check_range(first, stop, self.steps)
        return self._generate(first, stop)

    def position(self, step: int) -> int:
        """The position after ``step`` batches of every rank [samples].

        After the last step it is ``entries``: the epoch is over, whatever was dropped or padded.

        Raises:
            IndexError: unless 0 <= step <= steps.
        """
        _check_range(step, self.steps, self.steps)
        if step == self.steps:
            return self.entries
        return self.start + step * self.shard.world_size * self.batch_size

    @property
    def _share(self) -> int:
        """Samples of each rank before ``drop_last`` [samples]."""
        rest, ranks = self.entries - self.start, self.shard.world_size
        return rest // ranks if self.uneven == "drop" else -(-rest // ranks)

    @property
    def _full(self) -> int:
        """Batches of the full size [batches]."""
        return self._share // self.batch_size

    @property
    def _tail(self) -> int:
        """Samples in the short last batch; 0: there is none [samples]."""
        return 0 if self.drop_last else self._share % self.batch_size

    @functools.cached_property
    def _permutation(self) -> Permutation:
        return Permutation(self.entries, self.seed, self.epoch)

    def _generate(self, first: int, stop: int) -> Iterator[Indices]:
        size, full = self.batch_size, self._full
        each = np.arange(size if full else 0, dtype=np.int64)
        for low, high in _blocks(first, min(stop, full), size):
            steps = np.arange(low, high, dtype=np.int64)
            begins = self.start + (steps * self.shard.world_size + self.shard.rank) * size
            yield from self._entries_at(begins[:, None] + each)
        if first <= full < stop:
            begin = self.start + full * self.shard.world_size * size + self.shard.rank * self._tail
            yield self._entries_at(np.arange(begin, begin + self._tail, dtype=np.int64))

    def _entries_at(self, positions: Indices) -> Indices:
        if self.uneven == "pad" and int(positions.max()) >= self.entries:
            positions = positions % self.entries
        return self._permutation(positions) if self.shuffle else positions


@dataclasses.dataclass(frozen=True)
class ListPlan:
    """The batches of an explicit list that the caller has already sharded, in the list's order.

    Entry indices are places in the list. The caller owns equality between ranks; with
    ``fixed_steps`` the same on every rank, the plan helps: a longer list is cut.

    Attributes:
        entries: length of the list [samples].
        batch_size: B [samples].
        fixed_steps: exactly so many batches; ``None``: as many as the list gives [batches].
        uneven: what happens to a list that gives fewer: ``drop``: ``OptionError``; ``pad``: it is
            read again from its beginning until every batch is full.
        drop_last: leave out the short last batch.

    Raises:
        OptionError: for a value out of range, or a list too short for ``fixed_steps``.
        EmptyCatalog: an empty list, unless ``fixed_steps`` is 0.
    """

    entries: int
    batch_size: int
    fixed_steps: int | None = None
    uneven: Literal["drop", "pad"] = "drop"
    drop_last: bool = False

    def __post_init__(self) -> None:
        _whole(self, "entries", least=0)
        _whole(self, "batch_size", least=1)
        _check_uneven(self.uneven)
        if self.fixed_steps is not None:
            _whole(self, "fixed_steps", least=0)
        if self.entries == 0 and self.fixed_steps != 0:
            raise EmptyCatalog("nothing to read: the list of files is empty")
        if self._short and self.uneven == "drop":
            raise OptionError(
                f"steps={self.fixed_steps}: a list of {self.entries} files gives {self._given} "
                f"batches of {self.batch_size}{' with drop_last' if self.drop_last else ''}; "
                "give more files, fewer steps, or uneven='pad'"
            )

    @property
    def steps(self) -> int:
        """Batches [batches]."""
        return self._given if self.fixed_steps is None else self.fixed_steps

    @property
    def samples(self) -> int:
        """Samples in all batches [samples]."""
        wanted = self.steps * self.batch_size
        return wanted if self._short else min(wanted, self.entries)

    def batch(self, step: int) -> Indices:
        """See :meth:`Plan.batch`."""
        _check_step(step, self.steps)
        low = step * self.batch_size
        high = min(low + self.batch_size, self.samples)
        places = np.arange(low, high, dtype=np.int64)
        return places % self.entries if high > self.entries else places

    def batches(self, first: int = 0, stop: int | None = None) -> Iterator[Indices]:
        """See :meth:`Plan.batches`."""
        stop = self.steps if stop is None else stop
        _check_range(first, stop, self.steps)
        return map(self.batch, range(first, stop))

    def position(self, step: int) -> int:
        """Samples of the list in the first ``step`` batches; after the last one ``entries``.

        Raises:
            IndexError: unless 0 <= step <= steps.
        """
        _check_range(step, self.steps, self.steps)
        return self.entries if step == self.steps else min(step * self.batch_size, self.entries)

    @property
    def _given(self) -> int:
        """Batches that the list gives without repeating an entry [batches]."""
        full, rest = divmod(self.entries, self.batch_size)
        return full + (1 if rest and not self.drop_last else 0)

    @property
    def _short(self) -> bool:
        """The list gives fewer batches than are fixed."""
        return self.fixed_steps is not None and self._given < self.fixed_steps


def _blocks(first: int, stop: int, batch_size: int) -> Iterator[tuple[int, int]]:
    """Ranges of steps to make at once, small ones first."""
    samples, low = _FIRST_BLOCK, first
    while low < stop:
        high = min(stop, low + max(1, samples // batch_size))
        yield low, high
        low, samples = high, min(2 * samples, _BLOCK)


def _round_keys(seed: int, epoch: int) -> tuple[np.uint64, ...]:
    """One 64-bit key per round from a seed and an epoch of any size and sign."""
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * ROUNDS).digest()
    return tuple(np.frombuffer(digest, dtype="<u8").astype(np.uint64))


def _sorted_by_hash(n: int, keys: tuple[np.uint64, ...]) -> Indices:
    """The entries 0 … n-1 sorted by a keyed hash of each. The hash is a bijection: no ties."""
    entries = np.arange(n, dtype=np.uint64)
    return np.argsort(_mix(_mix(entries + keys[0]) + keys[1]), kind="stable").astype(np.int64)


def _walk(values: Words, n: int, keys: tuple[np.uint64, ...]) -> Words:
    """Send values, uint64 [m], through the network until each is below n."""
    height = math.isqrt(n - 1) + 1
    width = -(-n // height)
    values = _feistel(values, height, width, keys)
    outside = np.nonzero(values >= n)[0]
    while outside.size:
        again = _feistel(values[outside], height, width, keys)
        values[outside] = again
        outside = outside[again >= n]
    return values


def _feistel(values: Words, height: int, width: int, keys: tuple[np.uint64, ...]) -> Words:
    """A bijection of [0, height * width): the two coordinates are shifted by turns.

    Each round adds to one coordinate a hash of the other, modulo the side; sides below 2^32.
    """
    left = values // np.uint64(width)
    right = values - left * np.uint64(width)
    for turn, key in enumerate(keys):
        if turn % 2 == 0:
            left = _shifted(left, right, height, key)
        else:
            right = _shifted(right, left, width, key)
    return left * np.uint64(width) + right


def _shifted(values: Words, others: Words, side: int, key: np.uint64) -> Words:
    """(values + hash of others) modulo side, without dividing."""
    shift = _mix(others + key)
    shift >>= np.uint64(32)
    shift *= np.uint64(side)
    shift >>= np.uint64(32)
    shift += values
    shift -= (shift >= side) * np.uint64(side)
    return shift


def _mix(values: Words) -> Words:
    """Spread every bit over all 64: the finalizer of SplitMix64 (Steele, Lea, Flood 2014)."""
    mixed = values ^ (values >> np.uint64(30))
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def _whole(owner: object, name: str, least: int | None) -> None:
    """Make a field of a frozen dataclass a plain int, or say what is wrong with it."""
    value = getattr(owner, name)
    wanted = "a whole number" if least is None else f"a whole number >= {least}"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise OptionError(f"{name}={value!r}: must be {wanted}")
    if least is not None and value < least:
        raise OptionError(f"{name}={value!r}: must be {wanted}")
    object.__setattr__(owner, name, int(value))


def _check_uneven(value: str) -> None:
    if value not in ("drop", "pad"):
        raise OptionError(f"uneven={value!r}: must be one of 'drop', 'pad'")


def _check_step(step: int, steps: int) -> None:
    if not 0 <= step < steps:
        raise IndexError(f"step {step} is not in this plan of {steps} steps")


def _check_range(first: int, stop: int, steps: int) -> None:
    if not 0 <= first <= stop <= steps:
        raise IndexError(f"steps {first} to {stop} are not in this plan of {steps} steps")
