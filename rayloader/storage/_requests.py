"""What the storage of objects has to do: groups of objects, and requests for them."""

from __future__ import annotations

import asyncio
import enum
import os
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rayloader.errors import StorageError
from rayloader.storage import SKIP, Keys, Progress
from rayloader.storage._calls import Stage
from rayloader.storage.callers import Call
from rayloader.storage.uri import joined


class Kind(enum.Enum):
    """What a request is for."""

    HEAD = "learn the size"
    PEEK = "read an object whose size is not known, if it is small"
    ASK = "learn why HEAD was refused, which cannot say"
    WHOLE = "read an object"
    PIN = "learn the version that ranges are to be of"
    RANGE = "read a part"
    CHECK = "learn whether that version is still there"

    @property
    def is_read(self) -> bool:
        """It brings bytes of an object."""
        return self in (Kind.PEEK, Kind.WHOLE, Kind.RANGE)


class Way(enum.Enum):
    """How a request is sent."""

    ALONE = "by s3dlio"
    TOGETHER = "by s3dlio, for several objects at once"
    QUICK = "by obstore"
    STRAIGHT = "by rayloader's own client, straight into place"


class Version(NamedTuple):
    """What tells one object from another under the same key."""

    etag: str | None
    size: int


class Group:
    """Objects that are measured or read together; see ``BulkReader``."""

    def __init__(
        self, number: int, root: bytes, keys: Keys, sizes: npt.NDArray[np.int64] | None
    ) -> None:
        """Of these names, and of these sizes where they are listed, -1 where not [bytes]."""
        self.number = number
        self.root = root
        self.keys = keys
        self.n = keys.n
        self.stage = Stage.MEASURING
        self.listed = [-1] * keys.n if sizes is None else sizes.tolist()
        self.sizes: list[int] = list(self.listed)
        self.places = [SKIP] * keys.n
        self.failures: dict[int, StorageError] = {}
        self.peeked: dict[int, npt.NDArray[np.uint8]] = {}
        """All bytes of small objects that were read when they were to be measured."""
        self.versions: dict[int, Version] = {}
        """Of large objects, what their ranges are of."""
        self.parts_left: dict[int, int] = {}
        self.read_again: set[int] = set()
        self.unfinished = 0
        """Objects of the present step that are not done."""
        self.running = 0
        """Requests in flight."""
        self.discarded = False

    def name(self, index: int) -> str:
        """Of one object, as its user knows it."""
        return os.fsdecode(self.keys.key(index))

    def progress(self) -> Progress:
        """What is told of it; its failures are told once."""
        sizes = np.array(self.sizes, np.int64)
        sizes[list(self.failures)] = -1
        if self.stage is Stage.FETCHED:
            sizes[np.array(self.places, np.int64) == SKIP] = -1
        failures, self.failures = self.failures, {}
        return Progress(self.number, sizes, failures)


class Op:
    """One request, and those that repeat it."""

    __slots__ = (
        "again", "alone", "began", "beside", "bundled", "first", "future", "group", "index", "kind",
        "late", "length", "name", "offset", "scratch", "slow", "way", "why",
    )  # fmt: skip

    def __init__(
        self, group: Group, index: int, kind: Kind, offset: int = 0, length: int = 0
    ) -> None:
        """About one object; of a part of it, ``length`` bytes from ``offset`` on."""
        self.group = group
        self.index = index
        self.kind = kind
        self.name = joined(group.root, group.keys.key(index)).decode()
        """The object's whole URI."""
        self.offset = offset
        self.length = length
        self.again = 0
        """How often it has been sent again."""
        self.alone = False
        """Not in one call with others any more."""
        self.bundled = False
        """In one call with others now."""
        self.way = Way.ALONE
        self.slow = False
        """By nobody but s3dlio any more."""
        self.beside = 0
        """Of the memory for what is to be copied into place, what it takes now [bytes]."""
        self.first = 0.0
        """When it was first sent; all moments are of ``time.perf_counter`` [s]."""
        self.began = 0.0
        self.late = False
        """It was given up because it took too long."""
        self.future: asyncio.Future[Any] | Call | None = None
        self.scratch: npt.NDArray[np.uint8] | None = None
        self.why: StorageError | None = None
        """Of ASK: what there is to say if the answer says nothing."""
