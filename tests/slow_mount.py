"""A real file system whose reads take as long as a test wants: FUSE, spoken directly.

Needs root and /dev/fuse (``available``). The files are a dict of bytes; a read is answered after
``latency`` seconds, reads of a ``stuck`` name not at all, and ``errors`` gives names an error
number. One thread takes requests, another sends answers when they are due. The kernel caches only
what is in ``cached``, and each ``pread`` of up to 128 KiB of anything else is one request.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import heapq
import itertools
import os
import stat
import struct
import threading
import time

LOOKUP, FORGET, GETATTR, OPEN, READ, STATFS = 1, 2, 3, 14, 15, 17
RELEASE, INIT, OPENDIR, RELEASEDIR, INTERRUPT = 18, 26, 27, 29, 36
DESTROY, BATCH_FORGET = 38, 42
DIRECT_IO, KEEP_CACHE = 1, 2
MS_NOSUID, MS_NODEV, MNT_DETACH = 2, 4, 2
_libc = ctypes.CDLL(None, use_errno=True)


def available() -> bool:
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        return False
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError:
        return False
    return True


def _mount(target: bytes, fd: int) -> None:
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    if _libc.mount(b"slow", target, b"fuse.slow", MS_NOSUID | MS_NODEV, options):
        raise OSError(ctypes.get_errno(), "mount")


class SlowMount:
    """Files below ``root`` (bytes), until ``close``."""

    def __init__(self, root: bytes) -> None:
        self.root = root
        self.files: dict[bytes, bytes] = {}
        self.latency = 0.0
        self.open_latency = 0.0
        self.stuck: set[bytes] = set()
        self.errors: dict[bytes, list[int]] = {}
        """Name → numbers that its next reads fail with, one each."""
        self.open_errors: dict[bytes, list[int]] = {}
        self.cached: set[bytes] = set()
        """Names that the kernel may keep in its page cache."""
        self.most = 1 << 20
        """Bytes per answer: a read of more is cut short."""
        self.peak = 0
        """The most reads in flight at once; settable."""
        self._reading: set[int] = set()
        self._names = [b""]
        self._nodes = {b"": 1}
        self._held: list[tuple[bytes, int, bytes]] = []
        self._due: list[tuple[float, int, int, bytes, int]] = []
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self._fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        _mount(root, self._fd)
        self._threads = [
            threading.Thread(target=body, daemon=True) for body in (self._serve, self._answer_due)
        ]
        for thread in self._threads:
            thread.start()

    def release(self, name: bytes) -> None:
        """Answer the reads of a stuck name, now and from now on."""
        with self._changed:
            self.stuck.discard(name)
            for held in [held for held in self._held if held[0] == name]:
                self._held.remove(held)
                heapq.heappush(self._due, (0.0, next(self._order), held[1], held[2], 0))
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        _libc.umount2(self.root, MNT_DETACH)
        for held in self._held:
            self._send(held[1], b"", errno.EIO)
        # Any stat of the old root would go elsewhere now; the reading thread ends with the mount.
        self._threads[1].join()
        os.close(self._fd)

    def _serve(self) -> None:
        while not self._closed:
            try:
                request = os.read(self._fd, 1 << 17)
            except OSError as error:
                if error.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                    continue
                return  # unmounted
            _, opcode, unique, node = struct.unpack_from("<IIQQ", request)
            body = request[40:]
            name = self._names[node - 1] if 0 < node <= len(self._names) else b""
            with contextlib.suppress(OSError):
                self._handle(opcode, unique, name, body)

    def _handle(self, opcode: int, unique: int, name: bytes, body: bytes) -> None:
        if opcode in (FORGET, BATCH_FORGET, INTERRUPT):
            return
        if opcode == INIT:
            head = struct.pack(
                "<IIIIHHIIHHIIHH", 7, 31, 1 << 17, 0, 64, 64, 1 << 16, 1, 32, 0, 0, 0, 0, 0
            )
            self._send(unique, head.ljust(64, b"\0"))
        elif opcode == LOOKUP:
            child = b"/".join(filter(None, (name, body.rstrip(b"\0"))))
            self._look_up(unique, child)
        elif opcode == GETATTR:
            self._send(unique, struct.pack("<QII", 0, 0, 0) + self._attributes(name))
        elif opcode == OPEN:
            wrong = self.open_errors.get(name)
            if wrong:
                self._send(unique, b"", wrong.pop(0))
            else:
                how = KEEP_CACHE if name in self.cached else DIRECT_IO
                self._later(self.open_latency, unique, struct.pack("<QII", 0, how, 0))
        elif opcode == READ:
            self._read(unique, name, body)
        elif opcode == STATFS:
            self._send(unique, bytes(80))
        elif opcode in (RELEASE, OPENDIR, RELEASEDIR, DESTROY):
            self._send(unique, bytes(16) if opcode == OPENDIR else b"")
        else:
            self._send(unique, b"", errno.ENOSYS)

    def _look_up(self, unique: int, name: bytes) -> None:
        is_directory = any(other.startswith(name + b"/") for other in self.files)
        if name not in self.files and not is_directory:
            self._send(unique, b"", errno.ENOENT)
            return
        if name not in self._nodes:
            self._names.append(name)
            self._nodes[name] = len(self._names)
        entry = struct.pack("<QQQQII", self._nodes[name], 0, 0, 0, 0, 0)
        self._send(unique, entry + self._attributes(name))

    def _attributes(self, name: bytes) -> bytes:
        size = len(self.files.get(name, b""))
        mode = stat.S_IFREG | 0o644 if name in self.files else stat.S_IFDIR | 0o755
        return struct.pack(
            "<QQQQQQIIIIIIIIII",
            self._nodes[name],
            size,
            size // 512,
            0,
            0,
            0,
            0,
            0,
            0,
            mode,
            1,
            0,
            0,
            0,
            4096,
            0,
        )

    def _read(self, unique: int, name: bytes, body: bytes) -> None:
        _, offset, size = struct.unpack_from("<QQI", body)
        self._reading.add(unique)
        self.peak = max(self.peak, len(self._reading))
        wrong = self.errors.get(name)
        if wrong:
            self._later(self.latency, unique, b"", wrong.pop(0))
            return
        data = self.files.get(name, b"")[offset : offset + min(size, self.most)]
        with self._changed:
            if name in self.stuck:
                self._held.append((name, unique, data))
                return
        self._later(self.latency, unique, data)

    def _later(self, seconds: float, unique: int, data: bytes, error: int = 0) -> None:
        with self._changed:
            due = time.monotonic() + seconds
            heapq.heappush(self._due, (due, next(self._order), unique, data, error))
            self._changed.notify()

    def _answer_due(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (not self._due or self._due[0][0] > time.monotonic()):
                    self._changed.wait(self._due[0][0] - time.monotonic() if self._due else None)
                if self._closed:
                    return
                _, _, unique, data, error = heapq.heappop(self._due)
            with contextlib.suppress(OSError):
                self._send(unique, data, error)

    def _send(self, unique: int, data: bytes, error: int = 0) -> None:
        self._reading.discard(unique)  # first: the reader may send its next before we are back
        os.write(self._fd, struct.pack("<IiQ", 16 + len(data), -error, unique) + data)
