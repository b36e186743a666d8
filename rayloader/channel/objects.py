"""The trainer's end of the Ray channel."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

from rayloader.arena import Int64s
from rayloader.channel import Delivery, ReaderGone, ReaderProcess
from rayloader.channel.serve import Fetched
from rayloader.errors import ChannelError, chained
from rayloader.reader import Blocked, Ended, Failed, ReaderCounts, Ready, Request, Warned
from rayloader.tally import TallyPage


class RayChannel:
    """The trainer's end where reader and trainer share no memory: batches as actor results.

    A few calls are always under way; each brings one outcome, and a batch leaves the reader's
    arena when its call does. What is abandoned is simply not asked for any more.
    """

    name = "ray"
    _CALLS_AHEAD = 4
    _POLL_SECONDS = 1.0

    def __init__(
        self,
        actor: Any,
        welcome: dict[str, Any],
        process: ReaderProcess | None,
        tally: TallyPage,
    ) -> None:
        """Take batches from ``actor``, which has said ``welcome``.

        Args:
            actor: the reader.
            welcome: what it said of itself.
            process: its process when it runs on this node, else ``None``.
            tally: where the trainer counts; the reader is told with each call.
        """
        self._tally = tally
        self._process = process
        self._actor = actor
        self.welcome = welcome
        self._generation = 0
        self._calls: collections.deque[Any] = collections.deque()
        self._asked = 0
        self._page: Int64s | None = None

    def begin(self, request: Request) -> bool:
        """What comes from now on belongs to this request."""
        self.abandon(request.generation)
        return False

    def abandon(self, generation: int) -> None:
        """Have the reader leave what is older."""
        self._generation, self._asked = generation, 0
        self._actor.abandon.remote(generation)
        self._forget_calls()
        self._page = None

    def receive(self, on_wait: Callable[[], None]) -> Delivery | Ended | Warned:
        """Wait for the next outcome."""
        import ray

        while len(self._calls) < self._CALLS_AHEAD:
            counted = self._tally.take()
            self._calls.append(self._actor.take.remote(self._generation, self._asked, counted))
            self._asked += 1
        call = self._calls.popleft()
        try:
            while not ray.wait([call], timeout=self._POLL_SECONDS)[0]:
                if self._process is not None:
                    self._process.require_running()
                on_wait()
            fetched: Fetched | None = ray.get(call)
        except ray.exceptions.RayActorError as died:
            raise ReaderGone(f"the reader has died ({type(died).__name__})") from chained(died)
        except ray.exceptions.RayError as lost:
            raise _lost(lost) from chained(lost)
        if fetched is None:
            raise ChannelError("the reader works on another request")
        self._page = fetched.page
        match fetched.outcome:
            case Ready(step, _, _, _, nbytes, names, skipped):
                assert fetched.table is not None
                assert fetched.data is not None
                data, table = np.array(fetched.data), np.array(fetched.table)
                return Delivery(step, data, table, nbytes, names, skipped, private=False)
            case Failed(_, error):
                raise error
            case Ended() | Warned() as outcome:
                return outcome
            case Blocked():
                raise ChannelError("a reader is never blocked by what is fetched at once")

    def counts(self) -> ReaderCounts | None:
        """What came with the last outcome."""
        if self._page is None:
            return None
        counts = ReaderCounts.of(self._page)
        return counts if counts.generation == self._generation else None

    def set_concurrency(self, concurrency: int) -> None:
        """Change the ceiling on reads in flight [reads]."""
        self._actor.set_concurrency.remote(concurrency)

    def kill(self) -> bool:
        """End the reader's process when it runs on this node; elsewhere Ray does."""
        if self._process is not None and self._process.pidfd >= 0:
            self._process.kill()
        return True  # its arena is its own

    def close(self) -> None:
        """Ask for no more."""
        self._forget_calls()
        if self._process is not None:
            self._process.close()

    def _forget_calls(self) -> None:
        """Drop what is under way; a failure that nobody looks at would be printed by Ray."""
        import ray

        calls, self._calls = self._calls, collections.deque()
        for call in calls:
            with contextlib.suppress(Exception):
                if ray.is_initialized():
                    call.future().add_done_callback(_look_at)


def _look_at(done: concurrent.futures.Future[Any]) -> None:
    if not done.cancelled():
        done.exception()


def _lost(failure: Any) -> ChannelError:
    """What it means that Ray could not bring an outcome."""
    import ray

    cause = getattr(failure, "cause", None) or failure
    if isinstance(cause, ray.exceptions.OutOfDiskError | ray.exceptions.ObjectStoreFullError):
        return ChannelError(
            "Ray's object store has no room for a batch, nor has the disk of its temporary "
            "directory: free some there, give Ray a larger store, take a smaller batch_size, or "
            "run where channel='local' works"
        )
    said = str(cause).strip().splitlines() or [type(cause).__name__]
    return ReaderGone(f"Ray lost what the reader had sent: {said[-1]}")
