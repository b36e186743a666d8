"""How many requests to an object storage at once, and for how many objects to ask in one call."""

from __future__ import annotations

_SEVERAL = 8
"""Objects per call, and calls in flight below which it is fewer: so that the window stays nearly
full when one of them ends [objects, calls]."""
_PERIOD = 0.3
"""Of reading one way, before its rate is believed [s]."""
_FIRST_PROBE, _LAST_PROBE = 2.0, 30.0
"""Between two trials of the other way, which grows fourfold while the other is worse [s]."""
_WORTH = 0.9
"""Several per call are preferred if they bring this much of what one by one brings."""
_TWICE = 2
"""Trials in a row that several per call must lose: rates of a busy machine go up and down."""
_ALONE, _LONGEST_ALONE = 5.0, 300.0
"""After a call for several objects has failed, objects are asked for one by one so long; doubled
each time, until several per call have proved better again [s]."""


class Bundling:
    """How many objects to ask for per call: several, unless one by one brings more of them.

    Several per call cost much less CPU time, but all wait for the slowest of them. So now and then,
    while there is more to do than fits in the window, the other way is tried for a moment and its
    rate compared; the more often it has proved worse, the more seldom. Storage that answers about
    as fast as this process can ask is read several at a time, storage that answers unevenly one by
    one.
    """

    def __init__(self) -> None:
        """Several at first."""
        self._on = self._preferred = True
        self._rate = 0.0
        """Of the preferred way, when it was last looked at [objects/s]."""
        self._seconds, self._reads = 0.0, 0
        """In the present way, while there was enough to do."""
        self._last: tuple[float, int] | None = None
        self._pause = _FIRST_PROBE
        self._probe_at: float | None = None
        self._lost = 0
        """Trials in a row that several per call have lost."""
        self._alone = _ALONE

    def per_call(self, window: int) -> int:
        """Small objects to ask for in one call.

        Args:
            window: how many may be in flight [objects].
        """
        return max(1, min(_SEVERAL, window // _SEVERAL)) if self._on else 1

    def look(self, now: float, reads: int, saturated: bool) -> None:
        """Look at what has been read; every tenth of a second or so.

        Args:
            now: the moment [s].
            reads: reads completed so far [reads].
            saturated: there is more to ask for than fits in the window.
        """
        last, self._last = self._last, (now, reads) if saturated else None
        if last is None or not saturated:
            return
        self._seconds += now - last[0]
        self._reads += reads - last[1]
        if self._seconds < _PERIOD:
            return
        rate = self._reads / self._seconds
        if self._on != self._preferred:
            self._decide(rate, now)
        else:
            self._rate = rate
            if self._probe_at is None:
                self._probe_at = now + self._pause
            elif now >= self._probe_at:
                self._turn(not self._on)
        self._seconds, self._reads = 0.0, 0

    def failed(self, now: float) -> None:
        """A call for several objects has failed."""
        if not (self._on or self._preferred):
            return  # it was sent before one that has failed already: the same trouble
        self._preferred = False
        self._turn(False)
        self._probe_at = now + self._alone
        self._alone = min(2 * self._alone, _LONGEST_ALONE)

    def _decide(self, rate: float, now: float) -> None:
        """The other way has been tried."""
        several, single = (rate, self._rate) if self._on else (self._rate, rate)
        self._lost = 0 if several >= _WORTH * single else self._lost + 1
        better = not self._lost or (self._preferred and self._lost < _TWICE)
        if better == self._preferred:
            self._pause = (
                _FIRST_PROBE if better and self._lost else min(4 * self._pause, _LAST_PROBE)
            )
        else:
            self._preferred, self._rate = better, rate
            self._pause = _FIRST_PROBE
        if better:
            self._alone = _ALONE
        self._probe_at = now + self._pause
        self._turn(self._preferred)

    def _turn(self, on: bool) -> None:
        """What is in flight still is of the old way, so the next moment does not count."""
        self._on = on
        self._last = None
        self._seconds, self._reads = 0.0, 0


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
