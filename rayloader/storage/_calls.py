"""What calls of a ``BulkReader`` in Python are held against, before anything is done.

The C engine and its twin check the same for themselves; ``rayloader.testing`` has the contract.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from rayloader.config import PAGE
from rayloader.errors import UsageError
from rayloader.storage import DROP, SKIP


class Stage(enum.Enum):
    """MEASURING → MEASURED → FETCHING → FETCHED."""

    MEASURING = 1
    MEASURED = 2
    FETCHING = 3
    FETCHED = 4


class Group(Protocol):
    """What is looked at of a group: its number, how many objects, their sizes [bytes]."""

    number: int
    n: int
    stage: Stage
    sizes: list[int]


G = TypeVar("G", bound=Group)


def require_usable(closed: bool, pid: int) -> None:
    """Raise where a storage is closed, or belongs to another process than this one."""
    if closed:
        raise UsageError("the storage is closed")
    if pid != os.getpid():
        raise UsageError("the storage belongs to the process that opened it, not to a forked child")


def attachable(attached: memoryview | None, memory: memoryview) -> memoryview:
    """The memory to read into, as bytes.

    Raises:
        UsageError: there is some already.
        BufferError: it is not writable.
    """
    if attached is not None:
        raise UsageError("memory is attached already")
    view = memoryview(memory).cast("B")
    if view.readonly:
        raise BufferError("the memory is not writable")
    return view


def require_unused(group: int, groups: Mapping[int, Any]) -> None:
    """Raise where a group's number is in use."""
    if group in groups:
        raise UsageError(f"group {group} is in use")


def fetchable(group: int, groups: Mapping[int, G], done: Mapping[int, G]) -> G:
    """The group that may be fetched: it was measured, and that has been collected."""
    known = groups.get(group)
    if known is None or known.stage is not Stage.MEASURED or group in done:
        raise UsageError(f"group {group} is not a measured one")
    return known


def require_places(
    group: Group, places: npt.NDArray[np.int64], memory_bytes: int, direct: bool
) -> list[int]:
    """The places of a group's objects, each with room for its object.

    Args:
        group: with its sizes.
        places: int64 [n], of each object [bytes]; ``DROP`` and ``SKIP`` are some too.
        memory_bytes: that are attached [bytes].
        direct: places must be those of pages.

    Raises:
        UsageError: one has none, is not aligned, or was not measured.
    """
    if len(places) != group.n:
        raise UsageError(f"group {group.number} has another number of objects")
    page = PAGE if direct else 1
    found: list[int] = places.tolist()
    for i, (place, size) in enumerate(zip(found, group.sizes, strict=True)):
        if place == SKIP or (place == DROP and size >= 0):
            continue
        room = -(-size // page) * page
        if size < 0 or place < 0 or place % page or place + room > memory_bytes:
            raise UsageError(
                f"object {i} of group {group.number} cannot be read there: it was not measured, "
                "or the place is not aligned or leaves no room"
            )
    return found
