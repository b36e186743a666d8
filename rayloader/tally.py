"""What a trainer counts, kept where its reader finds it: in the arena's first page.

The trainer adds to it as it goes; whoever publishes takes what has come since. What has been taken
is noted in the page too, so that the next reader of this arena takes nothing twice.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rayloader import arena

_COUNTED_AT, _TAKEN_AT = 256, 272
"""Of the page's int64; the reader's own counts lie below."""


class Tally(NamedTuple):
    """What happened in a trainer, between two looks at it."""

    stall_ns: int = 0
    """Spent waiting in ``next()`` [ns]."""
    batches: int = 0
    files: int = 0
    """Samples delivered, or read and dropped."""
    bytes: int = 0
    """Their sizes [bytes]."""
    skipped: int = 0
    """Samples left out under ``on_error="skip"``."""
    restarts: int = 0
    """Readers started again."""
    errors: int = 0
    """Epochs that ended with an error."""


class TallyPage:
    """The trainer's part of an arena's first page."""

    def __init__(self, memory: memoryview) -> None:
        """Look into the arena ``memory``."""
        # Whole numbers of Python's, several times as quick as NumPy's: this is done per batch.
        self._page = np.frombuffer(memory, np.int64, arena.HEADER_BYTES // 8).data

    def add(self, tally: Tally) -> None:
        """Count more. One process does so."""
        page = self._page
        for i, count in enumerate(tally, _COUNTED_AT):
            if count:
                page[i] += count

    def take(self) -> Tally:
        """What has come since it was last taken. One process at a time does so."""
        page = self._page
        counted = page[_COUNTED_AT : _COUNTED_AT + len(Tally._fields)].tolist()
        taken = page[_TAKEN_AT : _TAKEN_AT + len(Tally._fields)].tolist()
        for i, count in enumerate(counted, _TAKEN_AT):
            page[i] = count
        return Tally(*(now - before for now, before in zip(counted, taken, strict=True)))

    def move_to(self, other: TallyPage) -> None:
        """Have another arena go on from here."""
        other._page[_COUNTED_AT:] = self._page[_COUNTED_AT:]
