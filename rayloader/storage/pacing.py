"""How many requests to an object storage at once, and whether to ask for several in one call."""

from __future__ import annotations

import time

_BUSY, _IDLE = 0.6, 0.3
"""CPU time of this process per second, from which it is busy, and below which no longer [s/s]."""
_BUSY_SECONDS = 0.3
"""Over which that is looked at [s]."""
_ALONE_SECONDS = 5.0
"""After a call for several objects has failed, objects are asked for one by one so long [s]."""


class Load:
    """Whether this process is so busy that calls should be few."""

    def __init__(self) -> None:
        """Not busy at first."""
        self.busy = False
        self._since = time.perf_counter()
        self._cpu = time.process_time()
        self._not_before = 0.0

    def look(self, now: float) -> None:
        """Look at the clocks; now and then."""
        if now - self._since < _BUSY_SECONDS:
            return
        cpu = time.process_time()
        share = (cpu - self._cpu) / (now - self._since)
        self._since, self._cpu = now, cpu
        self.busy = share > (_IDLE if self.busy else _BUSY) and now >= self._not_before

    def failed(self, now: float) -> None:
        """A call for several objects has failed."""
        self.busy = False
        self._not_before = now + _ALONE_SECONDS


class Window:
    """How many requests may be in flight: halved by trouble, grown back by success.

    Growth is by one per answer up to half of where the trouble began, then by one per window.
    """

    _CUT_SECONDS = 0.5
    """Trouble within this is the same trouble [s]."""

    def __init__(self, ceiling: int) -> None:
        """All that ``ceiling`` allows, at first [requests]."""
        self.ceiling = ceiling
        self._limit = self._threshold = float(ceiling)
        self._cut_at = -1.0

    @property
    def limit(self) -> int:
        """Requests that may be in flight now [requests]."""
        return int(self._limit)

    def set_ceiling(self, ceiling: int) -> None:
        """Allow more, or fewer."""
        if self._limit >= self.ceiling:
            self._limit = float(ceiling)
        self.ceiling = ceiling
        self._limit = min(self._limit, ceiling)
        self._threshold = float(ceiling)

    def trouble(self, now: float) -> None:
        """A request was throttled, or got no answer."""
        if now - self._cut_at >= self._CUT_SECONDS:
            self._cut_at = now
            self._threshold = max(1.0, self._limit / 2)
            self._limit = self._threshold

    def success(self) -> None:
        """A request was answered."""
        if self._limit < self.ceiling:
            step = 1.0 if self._limit < self._threshold else 1.0 / self._limit
            self._limit = min(self._limit + step, float(self.ceiling))
