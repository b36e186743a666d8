"""Test data in a bucket: what ``generate`` makes of a directory, as objects below a prefix."""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rayloader.catalog import SUFFIX, Catalog, Ticker
from rayloader.errors import EmptyCatalog, OptionError, UsageError, printable
from rayloader.experiment.recipe import (
    RECIPE,
    UNFINISHED,
    Recipe,
    check_maker,
    checksum,
    in_parallel,
    saved_before,
    some,
)
from rayloader.storage.access import Access
from rayloader.storage.bucket import Bucket
from rayloader.storage.uri import Location, location, root_of

_UPLOADS = 8
"""Objects on their way at once; making them is work too [objects]."""


def upload(uri: str, recipe: Recipe, access: Access | None, ticker: Ticker) -> Catalog:
    """Fill a prefix with a recipe's objects, and save their catalog beside it.

    Args:
        uri: ``s3://bucket/prefix``; the bucket must exist.
        recipe: what to make.
        access: where the bucket is and who asks; ``None``: as the environment says.
        ticker: told how many objects are there.

    Raises:
        OptionError: no prefix, or another scheme.
        UsageError: the prefix holds other objects, or was filled with other arguments.
        StorageError: an object cannot be written; it is named.
    """
    site = _Site(uri, access if access is not None else Access.found(os.environ))
    order, wanted = recipe.catalog(os.fsdecode(site.root))
    saved = site.saved()
    found = site.found()
    if _is_complete(saved, found, recipe, wanted):
        assert saved is not None
        return saved
    if found is not None:
        check_maker(uri, recipe, saved.extra[RECIPE] if saved else site.bucket.get(site.marker))
        strangers = sorted(set(found.keys.to_pylist()) - set(wanted.keys.to_pylist()))
        if strangers:
            raise UsageError(f"{printable(uri)} holds other objects: {some(strangers)}")
    site.bucket.put(site.marker, recipe.dumps())
    checksums = pa.array(_put_all(site, recipe, wanted, order, ticker))
    extra = {RECIPE: recipe.dumps()}
    catalog = Catalog(wanted.root, wanted.keys, wanted.sizes, checksums, extra)
    site.bucket.put(site.catalog, catalog.dumps())
    site.bucket.remove(site.marker)
    return catalog


class _Site:
    """A prefix, and the two objects beside it."""

    def __init__(self, uri: str, access: Access) -> None:
        place = location(os.fsencode(uri))
        if not place.prefix:
            raise OptionError(f"{printable(uri)}: the bucket itself; must be s3://BUCKET/PREFIX")
        self.root = root_of(place)
        above, _, name = place.prefix[:-1].rpartition(b"/")
        self.bucket = Bucket(root_of(Location(place.scheme, place.bucket, _below(above))), access)
        self.catalog = os.fsdecode(name) + SUFFIX
        self.marker = self.catalog + UNFINISHED
        self.access = access

    def saved(self) -> Catalog | None:
        """The catalog beside the prefix, if there is one.

        Raises:
            UsageError: something else has its name.
        """
        data = self.bucket.get(self.catalog)
        if data is None:
            return None
        name = f"{os.fsdecode(self.root)}{SUFFIX}"
        return saved_before(name, lambda: Catalog.loads(data, printable(name), self.root))

    def found(self) -> Catalog | None:
        """What lies below the prefix; ``None`` when that is nothing."""
        try:
            return Catalog.from_source(self.root, access=self.access)
        except EmptyCatalog:
            return None


def _below(directory: bytes) -> bytes:
    return directory + b"/" if directory else b""


def _is_complete(
    saved: Catalog | None, found: Catalog | None, recipe: Recipe, wanted: Catalog
) -> bool:
    """All objects are there, to the size of each, and nothing else is."""
    if saved is None or found is None or saved.extra[RECIPE] != recipe.dumps():
        return False
    return found.digest == wanted.digest and np.array_equal(found.sizes, wanted.sizes)  # type: ignore[arg-type]


def _put_all(
    site: _Site,
    recipe: Recipe,
    wanted: Catalog,
    order: npt.NDArray[np.int64],
    ticker: Ticker,
) -> npt.NDArray[np.uint32]:
    """Write every object; uint32 [files], the checksums in catalog order."""
    checksums, sizes = np.zeros(len(wanted), np.uint32), recipe.sizes()
    bucket = Bucket(site.root, site.access)

    def put_some(places: range) -> None:
        keys = wanted.keys_at(np.arange(places.start, places.stop))
        for place, key in zip(places, keys, strict=True):
            index = int(order[place])
            data = b"".join(block.data for block in recipe.blocks(index, int(sizes[index])))
            checksums[place] = checksum(data)
            bucket.put(os.fsdecode(key), data)

    for _ in in_parallel(put_some, len(wanted), ticker, _UPLOADS):
        pass
    return checksums
