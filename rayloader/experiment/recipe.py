"""What decides every byte of test data, wherever it is written to."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import numbers
import os
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rayloader.catalog import Catalog, Ticker
from rayloader.errors import (
    CatalogError,
    OptionError,
    StorageError,
    UsageError,
    printable,
    storage_error,
)

T = TypeVar("T")

RECIPE = b"rayloader.generate"
UNFINISHED = ".unfinished"
BLOCK = 4 << 20
"""Bytes made, written or read at once; a multiple of 8 [bytes]."""
_MAX_THREADS = 4
_FILES_AT_ONCE = 64
"""Files that one thread makes or reads in one go, at most [files]."""
_NAMED = 3
"""Names given in a message before the rest is only counted."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The arguments that decide every byte."""

    files: int
    size: int
    size_stdev: float
    subfolders: int
    seed: int

    def __post_init__(self) -> None:
        for name, least in (("files", 1), ("size", 1), ("subfolders", 0), ("seed", None)):
            value = getattr(self, name)
            whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
            if not whole or (least is not None and value < least):
                wanted = "a whole number" if least is None else f"a whole number >= {least}"
                raise OptionError(f"{name}={value!r}: must be {wanted}")
            object.__setattr__(self, name, int(value))
        stdev = self.size_stdev
        real = isinstance(stdev, numbers.Real) and not isinstance(stdev, bool)
        if not real or not 0 <= stdev < math.inf:
            raise OptionError(f"size_stdev={stdev!r}: must be a number of bytes >= 0")
        object.__setattr__(self, "size_stdev", float(stdev))

    def dumps(self) -> bytes:
        """The arguments by name, to recognise them by."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True).encode()

    def name(self, index: int) -> str:
        """The name of file ``index`` relative to the directory."""
        sample = f"sample_{index:0{max(6, len(str(self.files - 1)))}d}.bin"
        if not self.subfolders:
            return sample
        digits = max(2, len(str(self.subfolders - 1)))
        return f"part_{index % self.subfolders:0{digits}d}/{sample}"

    def sizes(self) -> npt.NDArray[np.int64]:
        """The size of every file, int64 [files], in the order of their numbers [bytes]."""
        if self.size_stdev == 0:
            return np.full(self.files, self.size, np.int64)
        normal = np.random.Generator(_stream(self.seed, "sizes")).standard_normal(self.files)
        return np.maximum(1, np.rint(self.size + self.size_stdev * normal)).astype(np.int64)

    def catalog(self, root: str) -> tuple[npt.NDArray[np.int64], Catalog]:
        """File numbers in catalog order, and the catalog without checksums."""
        names = [self.name(index) for index in range(self.files)]
        order = np.array(sorted(range(self.files), key=names.__getitem__), np.int64)
        keys = pa.array([names[index].encode() for index in order], pa.large_binary())
        return order, Catalog(os.fsencode(root), keys, self.sizes()[order])

    def blocks(self, index: int, size: int) -> Iterator[npt.NDArray[np.uint8]]:
        """The bytes of file ``index``, uint8, in blocks."""
        stream = _stream(self.seed, index)
        for begin in range(0, size, BLOCK):
            count = min(BLOCK, size - begin)
            words = stream.random_raw(-(-count // 8)).astype("<u8", copy=False)
            yield words.view(np.uint8)[:count]


def _stream(seed: int, purpose: int | str) -> np.random.PCG64DXSM:
    """An independent generator for each file; NumPy promises its raw output never changes."""
    digest = hashlib.blake2b(f"{seed}/{purpose}".encode(), digest_size=16).digest()
    return np.random.PCG64DXSM(int.from_bytes(digest, "little"))


def in_parallel(
    work: Callable[[range], T], count: int, ticker: Ticker, threads: int = 0
) -> Iterator[T]:
    """Do the places 0 … count-1 in threads, some at a time; results come in order.

    As many threads as there are CPUs, up to four, unless ``threads`` says otherwise.
    """
    threads = threads or min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    step = max(1, min(_FILES_AT_ONCE, count // (8 * threads)))
    parts = [range(low, min(low + step, count)) for low in range(0, count, step)]
    with ThreadPoolExecutor(threads, "rayloader-files") as pool:
        for part, result in zip(parts, pool.map(work, parts), strict=True):
            ticker(part.stop)
            yield result
    ticker.end(count)


def checksum(data: bytes | memoryview, before: int = 0) -> int:
    """CRC-32 of some bytes, going on from ``before``: what a catalog's checksums hold."""
    return zlib.crc32(data, before)


def make_directory(path: str) -> None:
    """Make a directory that results are to go to, unless it is there.

    Raises:
        StorageError: it cannot be made.
    """
    try:
        os.makedirs(path, exist_ok=True)
    except (FileNotFoundError, NotADirectoryError) as error:
        # Missing is what makedirs has just failed to make, as in /proc.
        why = f": {error.strerror}" if isinstance(error, NotADirectoryError) else " there"
        raise StorageError(
            path, f"the directory cannot be created{why}", error.errno or 0
        ) from error
    except OSError as error:
        raise storage_error(path, error.errno or 0) from error


def saved_before(path: str, load: Callable[[], Catalog]) -> Catalog:
    """The catalog that an earlier run saved where this one will.

    Args:
        path: its name.
        load: reads it.

    Raises:
        UsageError: something else has its name.
    """
    try:
        catalog = load()
    except CatalogError as error:
        raise UsageError(f"{printable(path)} would be overwritten: {error}") from error
    if RECIPE not in catalog.extra:
        raise UsageError(
            f"{printable(path)} would be overwritten: it is another data set's catalog"
        )
    return catalog


def check_maker(root: str, recipe: Recipe, maker: bytes | None) -> None:
    """Raise unless the files in the directory were made from the same recipe."""
    if maker is None:
        raise UsageError(
            f"{printable(root)} holds files that were not generated there; choose another directory"
        )
    if maker != recipe.dumps():
        before = ", ".join(f"{name}={value}" for name, value in _loads(maker).items())
        raise UsageError(
            f"{printable(root)} holds data generated with {before}; remove it or give the same"
        )


def _loads(recipe: bytes) -> dict[str, Any]:
    try:
        values = json.loads(recipe)
    except ValueError:
        return {"unknown": "arguments"}
    return values if isinstance(values, dict) else {"unknown": "arguments"}


def some(keys: list[bytes]) -> str:
    """A few names and how many more there are."""
    shown = ", ".join(printable(os.fsdecode(key)) for key in keys[:_NAMED])
    return shown + (f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else "")
