"""The files that are read, and what is known about them.

Method: incompressible files of one size, made once and kept between runs; the digest over all
their bytes is computed here, by none of the contenders, and each contender must reproduce it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

WORD = (1 << 64) - 1
MILLION = 1_000_000


@dataclasses.dataclass(frozen=True)
class FileSet:
    """Some files of one size.

    Attributes:
        root: the directory that holds them and nothing else.
        listing: a text file with one path per line.
        count: how many [files].
        size: of each one [bytes].
        digest: over every byte of every file, whatever their order.
    """

    root: Path
    listing: Path
    count: int
    size: int
    digest: int

    @property
    def bytes(self) -> int:
        """All files together [bytes]."""
        return self.count * self.size

    def paths(self) -> list[str]:
        """Every file, in the order of the listing."""
        return self.listing.read_text().splitlines()


def prepare(data: Path, count: int, size: int, *, fresh: bool = False) -> FileSet:
    """The files ``data/COUNTxSIZE``, made where they do not exist yet, in the page cache."""
    root = data / f"{count}x{size}"
    complete = root.with_suffix(".complete")
    if fresh or not complete.exists():
        shutil.rmtree(root, ignore_errors=True)
        _generate(root, count, size)
        complete.touch()
    paths = sorted(str(path) for path in root.rglob("*") if path.is_file())
    if len(paths) != count:
        raise SystemExit(f"{root}: {len(paths)} files instead of {count}; run with --fresh")
    listing = root.with_suffix(".list")
    listing.write_text("".join(f"{path}\n" for path in paths))
    return FileSet(root, listing, count, size, digest_of(paths, size))


def million(data: Path, files: FileSet) -> FileSet:
    """A saved catalog of 1,000,000 entries that names some files over and over.

    Its ``root`` is the catalog's file.
    """
    times, rest = divmod(MILLION, files.count)
    if rest:
        raise ValueError(f"{MILLION} is no multiple of {files.count}")
    saved = data / "million.arrow"
    if not saved.exists():
        from rayloader import Catalog

        Catalog.of_files(files.paths() * times).save(saved)
    digest = (files.digest * times) & WORD
    return FileSet(saved, files.listing, MILLION, files.size, digest)


def sample_digest(content: npt.NDArray[np.uint8]) -> int:
    """One file's share of the digest; the shares are added modulo 2^64."""
    whole = content.size & ~7
    words = int(content[:whole].view("<u8").sum(dtype=np.uint64))
    words += int.from_bytes(content[whole:].tobytes(), "little")
    return _scramble((words + _scramble(content.size + 1)) & WORD)


def make_cold(paths: Sequence[str]) -> str:
    """Drop the files from the page cache and make sure of it; returns the way it was done.

    Raises:
        SystemExit: when more than 1 % of a sample is still in memory.
    """
    way = "drop_caches" if os.geteuid() == 0 and _drop_all_caches() else "posix_fadvise"
    if way == "posix_fadvise":
        for path in paths:
            _with_file(path, lambda fd: os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED))
    left = resident_share(paths[:: max(1, len(paths) // 50)])
    if left > 0.01:
        raise SystemExit(f"{left:.0%} of the files stay in the page cache after {way}")
    return way


def resident_share(paths: Sequence[str]) -> float:
    """Share of these files' pages that the page cache holds, asked with mincore [0..1]."""
    libc = ctypes.CDLL(None, use_errno=True)
    held = pages = 0
    for path in paths:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
            count = -(-len(view) // mmap.PAGESIZE)
            answer = (ctypes.c_ubyte * count)()
            content = np.frombuffer(view, np.uint8)
            address, length = ctypes.c_void_p(content.ctypes.data), ctypes.c_size_t(len(view))
            del content
            if libc.mincore(address, length, answer) != 0:
                raise OSError(ctypes.get_errno(), "mincore", path)
            held += sum(byte & 1 for byte in answer)
            pages += count
    return held / max(1, pages)


def _generate(root: Path, count: int, size: int) -> None:
    from rayloader.experiment.generate import generate

    generate(root, files=count, size=size, seed=1)


def digest_of(paths: Sequence[str], size: int) -> int:
    """The digest over every byte of some files of one size."""
    total = 0
    for path in paths:
        content = np.fromfile(path, np.uint8)
        if content.size != size:
            raise SystemExit(f"{path}: {content.size} bytes instead of {size}; run with --fresh")
        total += sample_digest(content)
    return total & WORD


def _scramble(x: int) -> int:
    """The finaliser of splitmix64, as in peer.c."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
    return x ^ (x >> 31)


def _drop_all_caches() -> bool:
    """Ask the kernel to drop page cache, dentries and inodes; False where that is forbidden."""
    try:
        with open("/proc/sys/vm/drop_caches", "w") as switch:
            switch.write("3\n")
    except OSError:
        return False
    return True


def _with_file(path: str, act: Callable[[int], object]) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        act(fd)
    finally:
        os.close(fd)
