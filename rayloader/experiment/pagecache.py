"""How much of a data set the page cache holds: what "hot" and "cold" mean for a figure."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os

import numpy as np

from rayloader.catalog import Catalog

SAMPLED_FILES = 64
"""Files that stand for all of them [files]."""
HOT, COLD = 0.95, 0.05
"""Share of the files in the page cache from which on, and up to which, an epoch was hot or cold."""


def cached_share(catalog: Catalog, sampled: int = SAMPLED_FILES) -> float | None:
    """Share of the bytes of some files, spread over the catalog, that the page cache holds [0..1].

    ``None`` where the kernel does not say: files that are neither ours nor writable, or none that
    can be opened.
    """
    count = min(sampled, len(catalog))
    entries = np.linspace(0, len(catalog) - 1, count).astype(np.int64)
    pages = cached = 0
    for key in catalog.keys_at(entries):
        counted = _cached_pages(os.path.join(catalog.root, key))
        if counted is not None:
            pages += counted[0]
            cached += counted[1]
    return cached / pages if pages else None


def forget(path: bytes) -> None:
    """Have the kernel forget what it holds of a file; nothing happens where it cannot be opened."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _cached_pages(path: bytes) -> tuple[int, int] | None:
    """Pages of a file, and how many are cached; ``None`` where that cannot be told."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        # For anybody else's file mincore(2) claims that all of it is cached.
        if status.st_uid != os.geteuid() and not os.access(path, os.W_OK):
            return None
        return _resident(fd, status.st_size)
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)


def _resident(fd: int, size: int) -> tuple[int, int]:
    if size == 0:
        return 0, 0
    pages = -(-size // mmap.PAGESIZE)
    residence = np.zeros(pages, np.uint8)
    with mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as view:
        begin = ctypes.c_char.from_buffer(view)
        failed = ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(ctypes.addressof(begin)),
            ctypes.c_size_t(size),
            ctypes.c_void_p(residence.ctypes.data),
        )
        del begin
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    return pages, int((residence & 1).sum())
