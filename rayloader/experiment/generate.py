"""Test data that no cache, compressor or deduplicating store can make smaller.

Each file is the output of its own random generator (PCG64 DXSM, keyed by seed and file number):
the same arguments give the same bytes on any machine, and no two blocks of the data set agree.
The catalog lies *beside* the directory, as ``<directory>.arrow``, with sizes and CRC-32 checksums.
"""

from __future__ import annotations

import ctypes
import os

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rayloader.catalog import SUFFIX, Catalog, Progress, Ticker
from rayloader.errors import (
    CatalogError,
    StorageError,
    UsageError,
    printable,
    storage_error,
)
from rayloader.experiment.recipe import (
    BLOCK,
    RECIPE,
    UNFINISHED,
    Recipe,
    check_maker,
    checksum,
    in_parallel,
    make_directory,
    saved_before,
    some,
)
from rayloader.experiment.upload import upload
from rayloader.storage.access import Access
from rayloader.storage.listing import PosixLister
from rayloader.storage.uri import is_object


def generate(
    directory: str | os.PathLike[str],
    files: int,
    size: int,
    *,
    size_stdev: float = 0,
    subfolders: int = 0,
    seed: int = 0,
    progress: Progress | None = None,
    access: Access | None = None,
) -> Catalog:
    """Fill a directory with test data, flush it to disk, and save its catalog beside it.

    ``s3://bucket/prefix`` is filled the same way, and its catalog is ``s3://bucket/prefix.arrow``.

    Called again with the same arguments it finds the data complete and returns at once, or
    finishes what was interrupted.

    Args:
        directory: made if missing. It must hold nothing else.
        files: how many.
        size: of each file, or the mean [bytes].
        size_stdev: sizes are normally distributed around ``size``, at least 1 [bytes].
        subfolders: spread the files over ``part_00``, ``part_01`` …; 0: none.
        seed: another one gives other bytes and, with ``size_stdev``, other sizes.
        progress: called with the number of files written, at most ten times a second and at the
            end.
        access: where a bucket is and who asks; ``None``: as the environment says.

    Returns:
        The catalog, equal to what listing the directory gives, with sizes and checksums.

    Raises:
        OptionError: an argument is out of range.
        UsageError: the directory holds other files, or was made with other arguments.
        StorageError: a file cannot be written; it is named.
    """
    recipe = Recipe(files, size, size_stdev, subfolders, seed)
    if is_object(os.fsencode(directory)):
        return upload(os.fspath(directory), recipe, access, Ticker(progress))
    root = os.path.abspath(directory)
    order, wanted = recipe.catalog(root)
    saved = _saved(root)
    if _is_complete(saved, recipe, wanted):
        assert saved is not None
        return saved
    _claim(root, recipe, wanted, saved)
    checksums = _write_all(recipe, wanted, order, Ticker(progress))
    _flush(wanted.root)
    catalog = Catalog(
        wanted.root, wanted.keys, wanted.sizes, pa.array(checksums), {RECIPE: recipe.dumps()}
    )
    catalog.save(root + SUFFIX)
    os.unlink(root + SUFFIX + UNFINISHED)
    return Catalog.load(root + SUFFIX)


def verify(catalog: Catalog, progress: Progress | None = None) -> None:
    """Read every file of a catalog and compare it with its size and checksum.

    Args:
        catalog: one that :func:`generate` made.
        progress: called with the number of files read, as in :func:`generate`.

    Raises:
        CatalogError: the catalog has no sizes or no CRC-32 checksums.
        StorageError: a file is missing, unreadable or other than it was; the first is named, a
            note counts the others.
    """
    if catalog.sizes is None or catalog.checksums is None or catalog.checksums.type != pa.uint32():
        raise CatalogError("the catalog has no sizes and checksums to verify against")
    sizes, sums = catalog.sizes, catalog.checksums.to_numpy()

    def verify_some(places: range) -> list[StorageError]:
        keys = catalog.keys_at(np.arange(places.start, places.stop))
        found = (
            _verify_one(os.path.join(catalog.root, key), int(sizes[place]), int(sums[place]))
            for place, key in zip(places, keys, strict=True)
        )
        return [failure for failure in found if failure is not None]

    failures = [
        failure
        for some in in_parallel(verify_some, len(catalog), Ticker(progress))
        for failure in some
    ]
    if failures:
        if len(failures) > 1:
            failures[0].add_note(f"and {len(failures) - 1} more of {len(catalog)} files")
        raise failures[0]


def _saved(root: str) -> Catalog | None:
    """The catalog beside the directory, if there is one.

    Raises:
        UsageError: something else has its name.
    """
    path = root + SUFFIX
    return saved_before(path, lambda: Catalog.load(path)) if os.path.lexists(path) else None


def _is_complete(saved: Catalog | None, recipe: Recipe, wanted: Catalog) -> bool:
    """The data is there, to the size of every file, and nothing else is."""
    if saved is None or saved.extra[RECIPE] != recipe.dumps() or saved.root != wanted.root:
        return False
    if not os.path.isdir(wanted.root) or not os.listdir(wanted.root):
        return False
    found = Catalog.from_source(wanted.root, stat=True)
    return found.digest == wanted.digest and np.array_equal(found.sizes, wanted.sizes)  # type: ignore[arg-type]


def _claim(root: str, recipe: Recipe, wanted: Catalog, saved: Catalog | None) -> None:
    """Make the directory ours, or say whose it is."""
    marker = root + SUFFIX + UNFINISHED
    make_directory(root)
    try:
        found = {key for key, _ in PosixLister().list(wanted.root)}
        if found:
            check_maker(root, recipe, saved.extra[RECIPE] if saved else _read(marker))
        strangers = sorted(found.difference(wanted.keys.to_pylist()))
        if strangers:
            raise UsageError(f"{printable(root)} holds other files: {some(strangers)}")
        with open(marker, "wb") as file:
            file.write(recipe.dumps())
        for part in sorted({os.path.dirname(key) for key in wanted.keys.to_pylist()} - {b""}):
            os.makedirs(os.path.join(wanted.root, part), exist_ok=True)
    except OSError as error:
        raise storage_error(os.fsdecode(error.filename or root), error.errno or 0) from error


def unfinished(directory: str) -> str | None:
    """The mark of a :func:`generate` that was interrupted in this directory, if there is one."""
    if is_object(os.fsencode(directory)):
        return None
    mark = os.path.abspath(directory) + SUFFIX + UNFINISHED
    return mark if os.path.lexists(mark) else None


def _read(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None


def _write_all(
    recipe: Recipe, wanted: Catalog, order: npt.NDArray[np.int64], ticker: Ticker
) -> npt.NDArray[np.uint32]:
    """Write every file; uint32 [files], the checksums in catalog order."""
    checksums, sizes = np.zeros(len(wanted), np.uint32), recipe.sizes()

    def write_some(places: range) -> None:
        keys = wanted.keys_at(np.arange(places.start, places.stop))
        for place, key in zip(places, keys, strict=True):
            index, path = int(order[place]), os.path.join(wanted.root, key)
            checksums[place] = _write_one(recipe, index, path, int(sizes[index]))

    for _ in in_parallel(write_some, len(wanted), ticker):
        pass
    return checksums


def _flush(directory: bytes) -> None:
    """Write the directory's file system to disk: what is dirty cannot be dropped from a cache.

    Raises:
        StorageError: the disk reports that it could not take all of it.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(fd) != 0:
            raise storage_error(os.fsdecode(directory), ctypes.get_errno())
    finally:
        os.close(fd)


def _write_one(recipe: Recipe, index: int, path: bytes, size: int) -> int:
    value = 0
    try:
        with open(path, "wb") as file:
            for block in recipe.blocks(index, size):
                value = checksum(block.data, value)
                file.write(block.data)
    except OSError as error:
        raise storage_error(os.fsdecode(path), error.errno or 0) from error
    return value


def _verify_one(path: bytes, size: int, expected: int) -> StorageError | None:
    name, found, value = os.fsdecode(path), 0, 0
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            while block := file.read(BLOCK):
                found += len(block)
                value = checksum(block, value)
    except OSError as error:
        return storage_error(name, error.errno or 0)
    if found != size:
        return StorageError(name, f"it holds {found} bytes where the catalog has {size}")
    if value != expected:
        return StorageError(name, f"its CRC-32 is {value:08x} where the catalog has {expected:08x}")
    return None
