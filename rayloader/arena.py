"""Shared memory between one reader and its trainer: reserve, write, commit, lease, release.

The trainer makes the memory (an anonymous memfd, sealed against resizing) and hands it to every
reader it has in turn, so what it holds outlives a reader. The reader decides what lies where::

    page 0        counters of the reader, written by it, readable at any time; the trainer's tally
    then          batches; each is one extent, or several when no hole is large enough

    one batch     table: int64 [n, 3] = (where the sample begins, its size, its catalog entry)
                  samples, each aligned; padding up to a page

A sample that was read and dropped (``deliver=False``) has the place -1.
"""

from __future__ import annotations

import bisect
import contextlib
import fcntl
import mmap
import os
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rayloader import limits
from rayloader.config import PAGE, POPULATED_BYTES, READER_BYTES
from rayloader.errors import OptionError

HEADER_BYTES = PAGE
TABLE_COLUMNS = 3
NOT_DELIVERED = -1
"""Place of a sample whose bytes were dropped in the reader."""

_MADV_POPULATE_WRITE = 23
_F_ADD_SEALS = 1033
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW = 0x1, 0x2, 0x4

Int64s = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


def create_memory(length: int) -> int:
    """A memfd of ``length`` bytes that nobody can resize any more; the caller closes it."""
    fd = os.memfd_create("rayloader-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, length)
    fcntl.fcntl(fd, _F_ADD_SEALS, _SEAL_SHRINK | _SEAL_GROW | _SEAL_SEAL)
    return fd


def map_memory(fd: int) -> mmap.mmap:
    """Map a whole memfd, readable and writable, shared. It goes with its last view.

    Raises:
        OptionError: this process may not map so much.
    """
    length = os.fstat(fd).st_size
    try:
        mapping = mmap.mmap(fd, length)
    except OSError as error:
        why = limits.too_little_address_space(length) or error.strerror
        raise OptionError(
            f"{length:,} bytes for batches cannot be mapped: {why}, or set memory_bytes to less"
        ) from None
    mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def populate(mapping: mmap.mmap) -> None:
    """Touch the arena's first pages now, so that no batch waits for the kernel to clear them.

    First fit keeps a trainer that is fast enough within these. Older kernels (before 5.14) touch
    them when they are read into.
    """
    with contextlib.suppress(OSError, ValueError):
        mapping.madvise(_MADV_POPULATE_WRITE, 0, min(len(mapping), POPULATED_BYTES))


class Extent(NamedTuple):
    """A piece of the arena: [start, start + length) bytes, both multiples of a page."""

    start: int
    length: int


class Space:
    """Who uses which part of the arena. First fit by address.

    The lowest free bytes are used first, so that the part of the arena in use is as small as the
    batches in it: memory that was just given back is warm in the cache, and pages that were never
    needed are never touched.
    """

    def __init__(self, length: int, first: int = HEADER_BYTES) -> None:
        """Manage [first, length) bytes, both multiples of a page."""
        self.capacity = length - first
        self.free = self.capacity
        self._holes = [Extent(first, self.capacity)] if self.capacity else []

    def reserve(self, length: int) -> Extent | None:
        """Take ``length`` bytes, rounded up to a page, in one piece; ``None`` when no hole fits."""
        length = pages(length)
        for at, hole in enumerate(self._holes):
            if hole.length >= length:
                self._shrink(at, hole, length)
                return Extent(hole.start, length)
        return None

    def reserve_each(self, lengths: list[int]) -> list[Extent] | None:
        """Take one extent for each length; all or none."""
        taken: list[Extent] = []
        for length in lengths:
            extent = self.reserve(length)
            if extent is None:
                for back in taken:
                    self.release(back)
                return None
            taken.append(extent)
        return taken

    def hold(self, extent: Extent) -> None:
        """Take exactly this free extent (a lease from before the reader was restarted).

        Raises:
            ValueError: when a part of it is not free.
        """
        at = bisect.bisect_right(self._holes, extent.start, key=lambda hole: hole.start) - 1
        hole = self._holes[at] if at >= 0 else Extent(0, 0)
        before = extent.start - hole.start
        after = hole.length - before - extent.length
        if before < 0 or after < 0 or extent.length <= 0:
            raise ValueError(f"{extent} is not free")
        rest = [Extent(hole.start, before), Extent(extent.start + extent.length, after)]
        self._holes[at : at + 1] = [piece for piece in rest if piece.length]
        self.free -= extent.length

    def release(self, extent: Extent) -> None:
        """Give an extent back; it joins the holes beside it.

        Raises:
            ValueError: a part of it is free already.
        """
        at = bisect.bisect_left(self._holes, extent.start, key=lambda hole: hole.start)
        start, end = extent.start, extent.start + extent.length
        before = sum(self._holes[at - 1]) if at else 0
        if start < before or (at < len(self._holes) and end > self._holes[at].start):
            raise ValueError(f"{extent} is free already")
        first, last = at, at
        if at and before == start:
            first, start = at - 1, self._holes[at - 1].start
        if at < len(self._holes) and self._holes[at].start == end:
            last, end = at + 1, sum(self._holes[at])
        self._holes[first:last] = [Extent(start, end - start)]
        self.free += extent.length

    def _shrink(self, at: int, hole: Extent, length: int) -> None:
        if hole.length == length:
            del self._holes[at]
        else:
            self._holes[at] = Extent(hole.start + length, hole.length - length)
        self.free -= length


class Room(NamedTuple):
    """Where one batch lies: its extents, where its table begins, where each sample begins."""

    extents: list[Extent]
    table_at: int
    places: Int64s

    @property
    def length(self) -> int:
        """Bytes taken."""
        return sum(extent.length for extent in self.extents)


class Layout(NamedTuple):
    """How a batch lies: its table, then its samples one after the other."""

    table: int
    """Bytes of the table, aligned like a sample [bytes]."""
    begins: Int64s
    """int64 [n]: where sample i begins, from the batch's begin [bytes]."""
    rooms: Int64s
    """int64 [n]: the sample's size rounded up to the alignment [bytes]."""
    length: int
    """All in one piece; whole pages [bytes]."""


def lay_out(sizes: Int64s, alignment: int) -> Layout:
    """Lay out a batch.

    Args:
        sizes: int64 [n], the samples' sizes [bytes]; negative: needs no room.
        alignment: each sample begins at a multiple of this and has its size rounded up to it.
    """
    if not len(sizes):
        return Layout(_table_bytes(0, alignment), sizes, sizes, pages(_table_bytes(0, alignment)))
    return lay_out_each(sizes, np.zeros(1, np.int64), alignment)[0]


def lay_out_each(sizes: Int64s, starts: Int64s, alignment: int) -> list[Layout]:
    """Lay out several batches.

    Args:
        sizes: int64 [n], of all their samples, one batch after the other [bytes].
        starts: int64 [batches], where each batch's samples start in ``sizes``; none is empty.
        alignment: as for :func:`lay_out`.
    """
    rooms = _aligned(sizes, alignment)
    counts = np.diff(starts, append=len(sizes))
    tables = np.maximum(_aligned(8 * TABLE_COLUMNS * counts, alignment), alignment)
    ends = rooms.cumsum()
    before = ends[starts] - rooms[starts]
    ends += np.repeat(tables - before, counts)
    begins, last = ends - rooms, starts + counts
    lengths = _aligned(ends[last - 1], PAGE)
    return [
        Layout(table, begins[low:high], rooms[low:high], length)
        for table, low, high, length in zip(
            tables.tolist(), starts.tolist(), last.tolist(), lengths.tolist(), strict=True
        )
    ]


def reserve_batch(space: Space, layout: Layout) -> Room | None:
    """Find room for a batch: in one piece where possible, else sample by sample.

    Returns:
        The room, or ``None`` when the arena is too full now.
    """
    whole = space.reserve(layout.length)
    if whole is not None:
        return Room([whole], whole.start, layout.begins + whole.start)
    filled = np.flatnonzero(layout.rooms)
    pieces = space.reserve_each([layout.table, *layout.rooms[filled].tolist()])
    if pieces is None:
        return None
    places = np.full(len(layout.rooms), pieces[0].start, np.int64)
    places[filled] = [piece.start for piece in pieces[1:]]
    return Room(pieces, pieces[0].start, places)


def pieces(table_at: int, starts: Int64s, sizes: Int64s, alignment: int) -> list[Extent]:
    """The extents of a batch that was placed sample by sample, from its table."""
    lengths = _aligned(sizes, alignment)
    table = Extent(table_at, pages(_table_bytes(len(sizes), alignment)))
    return [table] + [
        Extent(int(start), pages(int(length)))
        for start, length in zip(starts, lengths, strict=True)
        if length and start != NOT_DELIVERED
    ]


def write_table(
    memory: memoryview, room: Room, places: Int64s, sizes: Int64s, entries: Int64s
) -> None:
    """Commit a batch: write its table in front of (or beside) its samples."""
    table = np.frombuffer(memory, np.int64, TABLE_COLUMNS * len(places), room.table_at).reshape(
        -1, TABLE_COLUMNS
    )
    table[:, 0], table[:, 1], table[:, 2] = places, sizes, entries


def read_table(memory: memoryview, table_at: int, samples: int) -> Int64s:
    """The table of a batch as int64 [n, 3], copied out of the arena.

    Raises:
        ValueError: when it does not lie in the arena, or a sample does not.
    """
    room = (len(memory) - table_at) // (8 * TABLE_COLUMNS)
    if table_at < HEADER_BYTES or not 0 <= samples <= room:
        raise ValueError(f"a table of {samples} samples at {table_at} is not in the arena")
    table = (
        np.frombuffer(memory, np.int64, TABLE_COLUMNS * samples, table_at)
        .reshape(-1, TABLE_COLUMNS)
        .copy()
    )
    if samples and not _inside(table[:, :2], len(memory)):
        raise ValueError(f"the table at {table_at} points outside the arena")
    return table


def gathered(table: Int64s, root: Bytes) -> tuple[Int64s, Bytes]:
    """A batch's samples behind one another in new memory, and its table with the new places."""
    table = table.copy()
    delivered = table[:, 0] != NOT_DELIVERED
    sizes = np.where(delivered, table[:, 1], 0)
    data = np.empty(int(sizes.sum()), np.uint8)
    ends = np.cumsum(sizes)
    for row in np.flatnonzero(delivered):
        start, size = int(table[row, 0]), int(sizes[row])
        data[ends[row] - size : ends[row]] = root[start : start + size]
        table[row, 0] = ends[row] - size
    return table, data


def _inside(extents: Int64s, length: int) -> bool:
    """Whether all samples lie in the arena, or none was delivered.

    Args:
        extents: int64 [n, 2], where each begins and how long it is [bytes].
        length: of the arena [bytes].
    """
    starts = extents[:, 0]
    if starts[0] == NOT_DELIVERED:
        return bool((starts == NOT_DELIVERED).all())
    # A negative number is a huge one without its sign; sums of numbers up to length fit.
    if extents.view(np.uint64).max() > length or starts.min() < HEADER_BYTES:
        return False
    return bool(extents.sum(axis=1).max() <= length)


def table_bytes(samples: int) -> int:
    """Room that the table of a batch takes where its bytes are dropped [bytes]."""
    return pages(_table_bytes(samples, PAGE))


def pages(length: int) -> int:
    """Round up to whole pages [bytes]."""
    return -(-length // PAGE) * PAGE


def _table_bytes(samples: int, alignment: int) -> int:
    return -(-max(1, 8 * TABLE_COLUMNS * samples) // alignment) * alignment


def _aligned(sizes: Int64s, alignment: int) -> Int64s:
    return (np.maximum(sizes, 0) + alignment - 1) // alignment * alignment


def affordable(wanted: int, ranks: int) -> int:
    """The length of arena that one of ``ranks`` on this node may have, at most ``wanted`` [bytes].

    Past a memory cgroup's limit the kernel kills without a word, so the arenas and readers of a
    node together stay below what its cgroup has free. Ask once Ray has taken its own.
    """
    share = limits.memory_free() // max(1, ranks) - READER_BYTES
    return max(2 * HEADER_BYTES, min(pages(wanted), share // PAGE * PAGE))
