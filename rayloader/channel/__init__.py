"""Between a reader and its trainer.

Two channels carry batches, with the same results. The *local* one shares the arena and talks over
a Unix socket (``wire``, ``local``); the *Ray* one copies batches through Ray's object store, where
memory cannot be shared (``objects``). ``serve`` is the reader's end of both.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from rayloader.arena import Int64s
from rayloader.config import KILL_SECONDS
from rayloader.errors import ChannelError
from rayloader.reader import Ended, ReaderCounts, Request, Warned
from rayloader.receipt import Fingerprint, Skipped


class Delivery(NamedTuple):
    """A batch in the trainer's hands."""

    step: int
    data: np.ndarray
    """uint8, writable; the lease (or the private copy) that all samples are views of."""
    table: Int64s
    """int64 [n, 3]: where in ``data`` a sample begins (-1: dropped in the reader), its size,
    its catalog entry."""
    nbytes: int
    names: Fingerprint
    skipped: list[Skipped]
    private: bool


class ReaderGone(ChannelError):
    """The reader process has died or hangs; the loader starts another."""


class ReaderProcess:
    """The reader's process on this node, held by a pidfd: no other process is ever meant."""

    def __init__(self, pid: int) -> None:
        """Hold process ``pid``.

        Raises:
            ProcessLookupError: it has died.
        """
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)

    def require_running(self) -> None:
        """A stopped process answers nobody for ever; treat it as dead.

        Raises:
            ReaderGone: it is dead or stopped.
        """
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as stat:
                state = stat.read().rpartition(b")")[2].split()[0]
        except OSError:
            state = b"X"
        if state in b"tTZX":
            raise ReaderGone(f"the reader's process is dead or stopped (state {state.decode()})")

    def kill(self) -> bool:
        """End it, stopped or not, and wait for its last thread.

        Returns:
            False when a read that hangs in the kernel keeps it: it may still write.
        """
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        death = select.poll()
        death.register(self.pidfd, select.POLLIN)
        return bool(death.poll(KILL_SECONDS * 1000))

    def close(self) -> None:
        """Give the descriptor back. Idempotent."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


class Channel(Protocol):
    """The trainer's end."""

    name: str
    welcome: dict[str, Any]
    """What the reader said of itself: ``pid``, ``engine``, ``client``, ``affinity``."""

    def begin(self, request: Request) -> bool:
        """What comes from now on belongs to this request.

        Returns:
            True when the request itself went along, False when the actor must be called with it.

        Raises:
            ReaderGone: there is nobody to tell.
        """
        ...

    def abandon(self, generation: int) -> None:
        """All requests before this one are not wanted any more.

        Raises:
            ReaderGone: there is nobody to tell.
        """
        ...

    def receive(self, on_wait: Callable[[], None]) -> Delivery | Ended | Warned:
        """Wait for the next thing.

        Args:
            on_wait: called about once a second of waiting; may raise.

        Raises:
            ReaderGone: the reader is dead or does not run any more.
            RayloaderError: what the reader failed with.
        """
        ...

    def counts(self) -> ReaderCounts | None:
        """What the reader has counted in this epoch, if it has begun it."""
        ...

    def set_concurrency(self, concurrency: int) -> None:
        """Change the ceiling on reads in flight [reads]."""
        ...

    def kill(self) -> bool:
        """End a reader that hangs, where it can be reached.

        Returns:
            False when it does not end and may still write into the arena.
        """
        ...

    def close(self) -> None:
        """Let the reader go. Batches that are held stay intact."""
        ...
