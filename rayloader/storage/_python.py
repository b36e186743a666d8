"""The POSIX engine in Python threads, for machines without the C extension."""

from __future__ import annotations

import enum


class FileCode(enum.IntEnum):
    """Why a file failed where the system has no number for it; the same as in _engine.h."""

    NOT_REGULAR = -1
    TRUNCATED = -2
    NO_DIRECT = -3
    REPLACED = -4
    BAD_NAME = -5


class Engine:
    """Not written yet."""
