"""Whether a sample is what its catalog says: CRC-32 of generated data, MD5 of a bucket's ETags."""

from __future__ import annotations

import hashlib
import re
import zlib

import numpy as np
import pyarrow as pa

from rayloader.arena import Int64s
from rayloader.catalog import Catalog
from rayloader.errors import OptionError, Replaced, StorageError

_MD5 = re.compile(rb"[0-9a-f]{32}")


class Checksums:
    """The checksums of a catalog's entries.

    Raises:
        OptionError: it has none.
    """

    def __init__(self, catalog: Catalog) -> None:
        """Those of ``catalog``."""
        column = catalog.checksums
        if column is None:
            raise OptionError(
                "verify needs a catalog with checksums: of generated data, or one that was listed "
                "with ETags (rayloader catalog --etags)"
            )
        is_crc = column.type == pa.uint32()
        self._column = column if is_crc else column.cast(pa.large_binary())

    def of(self, entries: Int64s) -> list[int | bytes]:
        """Those of some entries, int64 [n]."""
        # Not pa.array, which imports pandas.
        places = pa.py_buffer(np.ascontiguousarray(entries, np.int64))
        indices = pa.Array.from_buffers(pa.int64(), len(entries), [None, places])
        found: list[int | bytes] = self._column.take(indices).to_pylist()
        return found

    @staticmethod
    def failure(name: str, data: memoryview, expected: int | bytes) -> StorageError | None:
        """What is wrong with a sample's bytes; ``None`` when they are right.

        Args:
            name: of the sample.
            data: of the sample.
            expected: its checksum.
        """
        if isinstance(expected, int):
            found = zlib.crc32(data)
            if found == expected:
                return None
            return Replaced(name, f"its CRC-32 is {found:08x}, and {expected:08x} in the catalog")
        if not _MD5.fullmatch(expected):
            tag = expected.decode(errors="replace")
            return StorageError(name, f"its ETag {tag!r} is no MD5, so it cannot be verified")
        md5 = hashlib.md5(data, usedforsecurity=False).hexdigest()
        if md5 == expected.decode():
            return None
        return Replaced(name, f"its MD5 is {md5}, and its listed ETag {expected.decode()}")
