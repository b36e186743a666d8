"""Threads that wait for answers, so that nobody else need."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any


class Cancelled(Exception):
    """Nobody waits for this any more."""


class Call:
    """Some blocking work and what became of it: a future, as far as a loop looks at one."""

    __slots__ = ("_callers", "_cancelled", "_ended", "_error", "_result", "_socket", "_work")

    def __init__(
        self, callers: Callers, work: Callable[[Call], Any], ended: Callable[[Any], None]
    ) -> None:
        self._callers = callers
        self._work = work
        self._ended = ended
        self._cancelled = False
        self._socket: socket.socket | None = None
        self._result: Any = None
        self._error: BaseException | None = None

    # In any other thread

    def cancel(self) -> None:
        """End it soon: the connection that it waits for is shut down."""
        with self._callers.lock:
            self._cancelled = True
            if self._socket is not None:
                with contextlib.suppress(OSError):  # the server was quicker
                    self._socket.shutdown(socket.SHUT_RDWR)

    def cancelled(self) -> bool:
        """It was cancelled before it could end."""
        return self._cancelled and self._error is not None

    def exception(self) -> BaseException | None:
        """What it raised."""
        return self._error

    def result(self) -> Any:
        """What it returned."""
        return self._result

    # In the thread that does the work

    def waits_for(self, connection: socket.socket | None) -> None:
        """From now on it is this connection that ``cancel`` shuts down.

        Raises:
            Cancelled: it is too late.
        """
        with self._callers.lock:
            self._socket = connection
            if self._cancelled and connection is not None:
                raise Cancelled

    def run(self) -> None:
        """Do the work, and say so."""
        try:
            self._result = self._work(self)
        except BaseException as error:  # whoever asked for it looks at it
            # The frames would keep what it was reading into, and this call.
            self._error = error.with_traceback(None)
        self._callers.is_free()
        self._ended(self)


class Callers:
    """As many threads as there are calls at once."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Of all calls."""
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._busy = 0

    def call(self, work: Callable[[Call], Any], ended: Callable[[Any], None]) -> Call:
        """Have ``work`` done, and then ``ended`` called.

        Args:
            work: what blocks; it is given its call.
            ended: is given the call, too, in the same thread: which is free for another then.

        Raises:
            RuntimeError: there is no thread, and the system gives none.
        """
        call = Call(self, work, ended)
        with self.lock:
            if self._busy >= len(self._threads):
                self._start_thread()
            self._busy += 1
        self._calls.put(call)
        return call

    def is_free(self) -> None:
        """A thread has done its work."""
        with self.lock:
            self._busy -= 1

    def close(self, seconds: float) -> None:
        """End the threads; those that are in a call then are left to end after it."""
        deadline = time.monotonic() + seconds
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            if thread is threading.current_thread():
                continue  # the last to use what is closed
            thread.join(max(0.0, deadline - time.monotonic()))

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._serve, name="rayloader-get", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            if not self._threads:
                raise
            return  # those that there are do it one after the other
        self._threads.append(thread)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call.run()
            del call  # it has what it read into
