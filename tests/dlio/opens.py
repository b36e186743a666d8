"""Which files below some directories are opened, in which order: asked of the kernel by inotify.

Moments are files too: whoever wants to mark one opens a file in the directory of marks, and the
kernel keeps it in its place between the others, however late this process is told.
"""

from __future__ import annotations

import ctypes
import os
import select
import struct
import threading

OPEN, IN_ISDIR = 0x20, 0x40000000
HEAD = struct.Struct("iIII")


class Opens:
    """Collects opens from ``with`` to its end.

    Attributes:
        seen: paths, in order. Two opens of one file directly after one another may be one entry.
    """

    def __init__(self, *directories):
        self.seen = []
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._inotify = self._libc.inotify_init1(os.O_CLOEXEC)
        self._stop, self._stopped = os.pipe()
        self._directories = {}
        for directory in directories:
            for path, _, _ in os.walk(directory):
                watch = self._libc.inotify_add_watch(self._inotify, path.encode(), OPEN)
                assert watch >= 0, os.strerror(ctypes.get_errno())
                self._directories[watch] = path
        self._thread = threading.Thread(target=self._collect)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        os.close(self._stopped)
        self._thread.join(10)
        os.close(self._stop)
        os.close(self._inotify)

    def place(self, mark):
        """Where a mark stands between the files."""
        return self.seen.index(mark)

    def below(self, directory, first=0, last=None):
        """The files below a directory that were opened between two places."""
        return [path for path in self.seen[first:last] if path.startswith(directory)]

    def _collect(self):
        while True:
            ready, _, _ = select.select([self._inotify, self._stop], [], [])
            if self._inotify not in ready:
                return  # told to stop, and nothing is left to be read
            events, at = os.read(self._inotify, 1 << 20), 0
            while at < len(events):
                watch, mask, _, length = HEAD.unpack_from(events, at)
                at += HEAD.size
                name = events[at : at + length].rstrip(b"\0").decode()
                at += length
                if name and not mask & IN_ISDIR:
                    self.seen.append(os.path.join(self._directories[watch], name))
