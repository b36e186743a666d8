"""Opening, measuring and reading single files: what the threads of ``_python.Engine`` do."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import errno
import fcntl
import mmap
import os
import stat
import time
from typing import Protocol

import numpy as np

from rayloader.config import DESCRIPTOR_SECONDS, PAGE
from rayloader.storage import DROP, LATENCY_BUCKETS, SKIP, latency_bucket
from rayloader.storage._calls import Stage

STALE_RETRIES = 2
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


def _close(fd: int) -> None:
    """Close a descriptor. A network file system may fail even here; nothing read is lost by it."""
    with contextlib.suppress(OSError):
        os.close(fd)


class FileCode(enum.IntEnum):
    """Why a file failed where the system has no number for it; the same as in _engine.h."""

    NOT_REGULAR = -1
    TRUNCATED = -2
    NO_DIRECT = -3
    REPLACED = -4
    BAD_NAME = -5
    RESIZED = -6


class Direct(enum.IntEnum):
    NO = 0
    DEMANDED = 1
    PREFERRED = 2


class Failed(Exception):
    """One file failed, with this code."""

    def __init__(self, code: int) -> None:
        self.code = code


class Group:
    """Some files on their way. Guarded by the engine's lock, but for the files of a run."""

    def __init__(
        self, number: int, root: bytes, blob: bytes, offsets: list[int], direct: bool
    ) -> None:
        n = len(offsets) - 1
        self.number = number
        self.root = root
        self.root_fd = -1
        self.blob = blob
        self.offsets = offsets
        self.n = n
        self.stage = Stage.MEASURING
        self.discarded = False
        self.users = 0
        self.unfinished = n
        self.fds = [-1] * n
        self.sizes = [-1] * n
        self.codes = [0] * n
        self.identities: list[tuple[int, int]] = [(0, 0)] * n
        self.expected = False
        """The sizes were given; nobody has measured."""
        self.found = [-1] * n
        """The sizes that were not expected [bytes]."""
        self.places = [SKIP] * n
        self.parts_left = [0] * n
        self.direct = [direct] * n

    def name(self, i: int) -> bytes:
        return self.blob[self.offsets[i] : self.offsets[i + 1]]

    def take_resting(self, in_use: set[int]) -> list[int]:
        """The descriptors of all files that no run is about; the group forgets them."""
        resting = [i for i in range(self.n) if self.fds[i] >= 0 and i not in in_use]
        fds = [self.fds[i] for i in resting]
        for i in resting:
            self.fds[i] = -1
        return fds

    def close_file(self, i: int) -> int:
        """Close file i; how many were open [files]."""
        fd, self.fds[i] = self.fds[i], -1
        if fd < 0:
            return 0
        _close(fd)
        return 1

    def close_files(self) -> int:
        """Close everything; how many files were open [files]."""
        self.close_root()
        return sum(self.close_file(i) for i in range(self.n))

    def close_root(self) -> None:
        """Close the directory. It is open as a path only, so this asks no file system."""
        fd, self.root_fd = self.root_fd, -1
        if fd >= 0:
            _close(fd)

    def fail(self, i: int, code: int) -> None:
        """The first failure of a file is the one that counts."""
        self.codes[i] = self.codes[i] or code

    def result(self) -> tuple[int, bytes, bytes | None]:
        """What ``Engine.collect`` gives."""
        sizes = np.array(self.sizes, np.int64)
        codes = np.array(self.codes, np.int32)
        if self.stage is Stage.FETCHED:
            skipped = np.array(self.places, np.int64) == SKIP
            sizes[skipped], codes[skipped] = -1, 0
        resized = codes == FileCode.RESIZED
        sizes[resized], codes[resized] = np.array(self.found, np.int64)[resized], 0
        sizes[codes != 0] = -1
        return self.number, sizes.tobytes(), codes.tobytes() if codes.any() else None


@dataclasses.dataclass(slots=True)
class Tally:
    """One worker's share of the counters."""

    metadata_ops: int = 0
    reads: int = 0
    bytes: int = 0
    retries: int = 0
    read_seconds: float = 0.0
    latency: list[int] = dataclasses.field(default_factory=lambda: [0] * LATENCY_BUCKETS)
    direct_bytes: int = 0
    fallback_files: int = 0
    dropped_files: int = 0


def round_up(size: int) -> int:
    return (size + PAGE - 1) // PAGE * PAGE


class Surroundings(Protocol):
    """What reading a file needs of the engine around it."""

    direct: Direct
    drop_cache: bool
    stopped: bool
    memory: memoryview
    scratch_part: int

    def shed_files(self) -> bool:
        """Close files at rest to have descriptors. True if there was one."""
        ...

    def fell_back(self, group: Group, i: int) -> bool:
        """The file is read without O_DIRECT from now on. True the first time."""
        ...

    def keep_root(self, group: Group, fd: int) -> bool:
        """Keep the group's directory open. False when another worker was first."""
        ...

    def meet(self, group: Group, i: int, identity: tuple[int, int]) -> bool:
        """Learn (device, inode) of an unmeasured file; all its ranges are read from that one.

        Returns:
            True the first time.
        """
        ...


class Files:
    """Opens, measures and reads single files for one worker; every failure is a ``Failed``."""

    def __init__(self, engine: Surroundings) -> None:
        self._engine = engine
        self._scratch: mmap.mmap | None = None
        self.tally = Tally()

    def measure(self, group: Group, i: int, keep: bool) -> None:
        fd, status = self._open(group, i)
        group.identities[i] = (status.st_dev, status.st_ino)
        group.sizes[i] = status.st_size
        self._drop_cached(fd)
        if keep:
            group.fds[i] = fd
        else:
            _close(fd)

    def read(self, group: Group, i: int, offset: int, length: int) -> None:
        """Read a range into its place."""
        place, room = group.places[i], length
        if group.direct[i]:
            room = round_up(length)
        if place == DROP:
            view = self._scratch_view(room)
        else:
            view = self._engine.memory[place + offset : place + offset + room]
        began = time.perf_counter()
        try:
            self._read_range(group, i, offset, length, view)
        finally:
            seconds = time.perf_counter() - began
            self.tally.reads += 1
            self.tally.read_seconds += seconds
            self.tally.latency[latency_bucket(seconds)] += 1

    def drop_scratch(self) -> None:
        self._scratch = None

    def _scratch_view(self, room: int) -> memoryview:
        wanted = max(self._engine.scratch_part, round_up(room))
        if self._scratch is None or len(self._scratch) != wanted:
            self._scratch = mmap.mmap(-1, wanted)
        return memoryview(self._scratch)[:room]

    def _open(self, group: Group, i: int) -> tuple[int, os.stat_result]:
        """Open a file and learn what it is; only a regular one is given."""
        name, direct, refused = group.name(i), group.direct[i], False
        if b"\0" in name:
            raise Failed(FileCode.BAD_NAME)
        root = None if name.startswith(b"/") else self._root(group)
        try:
            fd = self._open_at(group, root, name, _FLAGS | (os.O_DIRECT if direct else 0))
        except Failed as error:
            if error.code != errno.EINVAL or not direct:
                raise
            refused = True  # or it is no file at all: look, before O_DIRECT is blamed
            fd = self._open_at(group, root, name, _FLAGS)
        try:
            self.tally.metadata_ops += 1
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise Failed(FileCode.NOT_REGULAR)
            if refused and self._engine.direct is Direct.DEMANDED:
                raise Failed(FileCode.NO_DIRECT)
            if refused:
                self._fall_back(group, i)
        except OSError as error:
            _close(fd)
            raise Failed(error.errno or errno.EIO) from error
        except Failed:
            _close(fd)
            raise
        return fd, status

    def _root(self, group: Group) -> int | None:
        """The group's directory, opened anew for each group: a root may be a symbolic link."""
        if not group.root:
            return None
        if group.root_fd < 0:
            flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
            fd = self._open_at(group, None, group.root, flags)
            if not self._engine.keep_root(group, fd):
                _close(fd)
        return group.root_fd

    def _open_at(self, group: Group, root: int | None, name: bytes, flags: int) -> int:
        waited, stale = 0.0, 0
        while True:
            self.tally.metadata_ops += 1
            try:
                return os.open(name, flags, dir_fd=root)
            except BlockingIOError:
                return self._open_leased(root, name, flags)
            except ValueError as error:  # a NUL byte in the root
                raise Failed(FileCode.BAD_NAME) from error
            except OSError as error:
                code = error.errno or errno.EIO
            if code in (errno.EMFILE, errno.ENFILE):
                waited = self._await_descriptor(group, waited, code)
            elif code == errno.ESTALE and stale < STALE_RETRIES:
                stale += 1
                self.tally.retries += 1
            else:
                raise Failed(code)

    def _open_leased(self, root: int | None, name: bytes, flags: int) -> int:
        """Open a file under somebody's lease: O_NONBLOCK refuses, waiting is right."""
        try:
            path = os.open(name, os.O_PATH | os.O_CLOEXEC, dir_fd=root)
            try:
                if not stat.S_ISREG(os.fstat(path).st_mode):
                    raise Failed(FileCode.NOT_REGULAR)
                # Through /proc it is surely the file looked at, never a FIFO put in its place.
                return os.open(f"/proc/self/fd/{path}", flags & ~os.O_NONBLOCK)
            finally:
                _close(path)
        except OSError as error:
            raise Failed(error.errno or errno.EIO) from error

    def _await_descriptor(self, group: Group, waited: float, code: int) -> float:
        self.tally.retries += 1
        if self._engine.shed_files():
            return waited
        if waited >= DESCRIPTOR_SECONDS or group.discarded or self._engine.stopped:
            raise Failed(code)
        pause = 1e-3 if waited < 0.02 else 0.02
        time.sleep(pause)
        return waited + pause

    def _reopen(self, group: Group, i: int) -> int:
        """Open a file to read it, and make sure that it is the one that is meant."""
        fd, status = self._open(group, i)
        try:
            self._recognise(group, i, fd, status)
        except Failed:
            _close(fd)
            raise
        return fd

    def _recognise(self, group: Group, i: int, fd: int, status: os.stat_result) -> None:
        identity = (status.st_dev, status.st_ino)
        if group.expected:
            if status.st_size != group.sizes[i]:
                group.found[i] = status.st_size
                raise Failed(FileCode.RESIZED)
            if self._engine.meet(group, i, identity):
                self._drop_cached(fd)
        if identity != group.identities[i]:
            raise Failed(FileCode.REPLACED)
        if status.st_size < group.sizes[i]:
            raise Failed(FileCode.TRUNCATED)

    def _drop_cached(self, fd: int) -> None:
        if self._engine.drop_cache:
            with contextlib.suppress(OSError):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                self.tally.dropped_files += 1

    def _read_range(self, group: Group, i: int, offset: int, length: int, view: memoryview) -> None:
        fd, own, stale = group.fds[i], -1, 0
        try:
            while True:
                if fd < 0:
                    fd = own = self._reopen(group, i)
                try:
                    return self._read_from(fd, group, i, offset, length, view)
                except OSError as error:
                    if error.errno != errno.ESTALE or stale >= STALE_RETRIES:
                        raise Failed(error.errno or errno.EIO) from error
                stale += 1  # all of the range again, from one open file
                self.tally.retries += 1
                if own >= 0:
                    _close(own)
                fd = own = -1
        finally:
            if own >= 0:
                _close(own)

    def _read_from(
        self, fd: int, group: Group, i: int, offset: int, length: int, view: memoryview
    ) -> None:
        got, end, patient, refused = 0, -1, False, 0
        while got < length:
            direct = group.direct[i]
            start = got // PAGE * PAGE if direct else got
            stop = round_up(length) if direct else length
            try:
                n = os.preadv(fd, [view[start:stop] if got else view], offset + start)
            except BlockingIOError:
                if patient:
                    raise
                patient = True  # some file system takes O_NONBLOCK seriously
                os.set_blocking(fd, True)
                continue
            except OSError as error:
                if error.errno != errno.EINVAL or self._engine.direct is Direct.NO:
                    raise
                refused += 1
                self._without_direct(fd, group, i, refused)
                continue
            self.tally.bytes += n
            self.tally.direct_bytes += n if direct else 0
            got = start + n
            # O_DIRECT starts again at the last page; the same end twice is the end.
            if n == 0 or (got < length and got == end):
                raise Failed(FileCode.TRUNCATED)
            end = got

    def _without_direct(self, fd: int, group: Group, i: int, refused: int) -> None:
        if self._engine.direct is Direct.DEMANDED:
            raise Failed(FileCode.NO_DIRECT)
        if refused > 2:  # another range of the file may have been taking O_DIRECT off
            raise Failed(errno.EINVAL)
        self._fall_back(group, i)
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)

    def _fall_back(self, group: Group, i: int) -> None:
        self.tally.fallback_files += self._engine.fell_back(group, i)
