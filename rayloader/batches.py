"""The batches of a request, with all that is known of them before anything is read.

What has a fixed cost (looking names up, hashing them, laying samples out) is done for many
batches at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rayloader import arena
from rayloader.arena import Int64s, Layout
from rayloader.catalog import Catalog
from rayloader.config import SIZES_REMEMBERED
from rayloader.receipt import Fingerprint, Hashes, name_hashes
from rayloader.storage import Keys
from rayloader.storage.uri import is_object

_FIRST_BLOCK = 256
"""The trainer waits for these [samples]."""
_BLOCK = 2048
"""A block's fixed cost is that of a few hundred samples [samples]."""


class Planned(NamedTuple):
    """One batch, not yet read."""

    step: int
    entries: Int64s
    keys: Keys
    hashes: Hashes
    """uint64 [n], of the names."""
    names: Fingerprint
    sizes: Int64s
    """int64 [n], -1 where unknown [bytes]."""
    layout: Layout
    """As the sizes have it."""
    nbytes: int
    """The sum of the known sizes [bytes]."""
    largest: int
    """The largest of the known sizes [bytes]."""
    expected: bool
    """Every size is known."""


class Sizes:
    """The sizes of a catalog's entries, as it tells them or as files were when last measured."""

    def __init__(self) -> None:
        self._catalog: Catalog | None = None
        self._listed: Int64s | None = None
        """The catalog's own sizes, which a node's ranks have in common."""
        self._learned: npt.NDArray[np.uint32] | None = None
        """By entry: the size plus one, 0 where it is unknown or takes more than 32 bits."""

    def turn_to(self, catalog: Catalog) -> None:
        """From now on entries are this catalog's."""
        if catalog is self._catalog:
            return
        self._catalog, self._listed, self._learned = catalog, catalog.sizes, None
        learns = not is_object(catalog.root) and len(catalog) <= SIZES_REMEMBERED
        if self._listed is None and learns:
            self._learned = np.zeros(len(catalog), np.uint32)

    def of(self, entries: Int64s) -> Int64s:
        """Their sizes, int64 [n], -1 where unknown [bytes]."""
        if self._learned is not None:
            return self._learned[entries].astype(np.int64) - 1
        if self._listed is not None:
            return self._listed[entries]
        return np.full(len(entries), -1, np.int64)

    def learn(self, entries: Int64s, sizes: Int64s) -> None:
        """They have been measured."""
        if self._learned is None:
            if self._listed is None or (self._listed[entries] == sizes).all():
                return
            if len(self._listed) > SIZES_REMEMBERED:
                return
            self._learned = _packed(self._listed)
        self._learned[entries] = _packed(sizes)

    def forget(self, entries: Int64s) -> None:
        """They are not what they were."""
        self.learn(entries, np.full(len(entries), -1, np.int64))


def _packed(sizes: Int64s) -> npt.NDArray[np.uint32]:
    fits = (sizes >= 0) & (sizes < np.iinfo(np.uint32).max)
    return np.where(fits, sizes + 1, 0).astype(np.uint32)


def planned(
    steps: Iterable[tuple[int, Int64s]], catalog: Catalog, sizes: Sizes, alignment: int
) -> Iterator[Planned]:
    """The batches of some steps, looked at in blocks, of which the first is small.

    Args:
        steps: the number and the entries of each step; none is empty.
        catalog: whose entries they are.
        sizes: what is known of their sizes.
        alignment: each sample begins at a multiple of this [bytes].
    """
    steps, samples = iter(steps), _FIRST_BLOCK
    for step in steps:
        more = max(1, samples // len(step[1])) - 1
        yield from _looked_at([step, *itertools.islice(steps, more)], catalog, sizes, alignment)
        samples = _BLOCK


def _looked_at(
    block: list[tuple[int, Int64s]], catalog: Catalog, sizes: Sizes, alignment: int
) -> Iterator[Planned]:
    all_entries = np.concatenate([entries for _, entries in block])
    ends = np.cumsum([len(entries) for _, entries in block])
    starts = ends - [len(entries) for _, entries in block]
    blob, offsets = catalog.blob_at(all_entries)
    hashes = name_hashes(blob, offsets)
    known = sizes.of(all_entries)
    names = Fingerprint.of_each(hashes, starts)
    layouts = arena.lay_out_each(known, starts, alignment)
    counted = np.maximum(known, 0)
    nbytes = np.add.reduceat(counted, starts).tolist()
    largest = np.maximum.reduceat(counted, starts).tolist()
    expected = (np.minimum.reduceat(known, starts) >= 0).tolist()
    for i, (first, last) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        step, entries = block[i]
        begin, end = int(offsets[first]), int(offsets[last])
        keys = Keys(blob[begin:end], offsets[first : last + 1] - begin)
        own = slice(first, last)
        yield Planned(
            step, entries, keys, hashes[own], names[i], known[own], layouts[i], nbytes[i],
            largest[i], expected[i],
        )  # fmt: skip
