"""Storage: the protocols at the seam, and which scheme is served by what.

A storage gives bytes. Whoever decides *which* bytes (the plan) and *where they go* (the arena)
lives above; how many reads are in flight, how a large object is cut into ranges and what is
tried again is decided here and nowhere else.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from rayloader.errors import StorageError
    from rayloader.storage.access import Access


DROP = -1
"""A place: read the object and drop its bytes."""
SKIP = -2
"""A place: do not read the object."""
LATENCY_BUCKETS = 128
_EDGES = [2.0 ** (i / 4) for i in range(1, LATENCY_BUCKETS)]


class Keys(NamedTuple):
    """Many keys as one value, which an engine takes without a Python object per key.

    A pair, so that ``Keys(*catalog.blob_at(indices))`` is one; ``len`` of it is therefore 2, and
    ``n`` is the number of keys.

    Attributes:
        blob: all keys, one after the other, without separators.
        offsets: int64 [n + 1]; key i is ``blob[offsets[i]:offsets[i + 1]]`` [bytes].
    """

    blob: bytes
    offsets: npt.NDArray[np.int64]

    @classmethod
    def of(cls, keys: Sequence[bytes]) -> Keys:
        """The same keys, from a sequence of bytes."""
        offsets = np.zeros(len(keys) + 1, np.int64)
        np.cumsum([len(key) for key in keys], out=offsets[1:])
        return cls(b"".join(keys), offsets)

    @property
    def n(self) -> int:
        """How many keys there are."""
        return len(self.offsets) - 1

    def key(self, i: int) -> bytes:
        """Key ``i``, from 0 to n - 1."""
        return self.blob[self.offsets[i] : self.offsets[i + 1]]


@dataclasses.dataclass(frozen=True)
class StorageSpec:
    """The recipe of a storage. It travels; pools, threads and clients are made where they run."""

    scheme: str = "file"
    concurrency: int = 64
    """Ceiling on reads in flight [reads]."""
    part_bytes: int = 8 << 20
    """Larger objects are read as ranges of this length [bytes]."""
    scratch_bytes: int = 512 << 20
    """Bound on all part buffers for objects that are read and dropped [bytes]."""
    direct: bool | Literal["fallback"] = False
    """O_DIRECT: no, or a refusal is ``DirectUnsupported``, or a refusal is counted."""
    drop_cache: bool = False
    """Ask the kernel to drop each file from its page cache when it is measured. Pages that have
    not been written to the device yet stay."""
    engine: Literal["auto", "native", "python"] = "auto"
    """What reads files: the C extension, or Python threads."""
    ranges_bytes: int = 64 << 20
    """Object storage: bound on what arrives beside the attached memory and has not yet been put
    into place: ranges, small objects, and what was peeked at [bytes]."""
    client: Literal["auto", "http", "obstore", "s3dlio"] = "auto"
    """S3: what reads objects and ranges; see ``Options``."""
    peek: bool = False
    """S3: learn the size of a small object by reading it, so that one request does for both. What
    was read when it was measured is what ``fetch`` gives, and is held until then, beside the
    attached memory, within ``ranges_bytes``."""
    request_timeout: float = 60.0
    """Object storage: a request that has not ended by then is given up and sent again [s]."""
    retry_seconds: float = 120.0
    """Object storage: how long one object is asked for again after failures that may pass [s]."""
    access: Access | None = dataclasses.field(default=None, repr=False)
    """Object storage: where it is and who asks. A spec that has one cannot be pickled."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """What happened to one group of objects.

    Attributes:
        group: the number the group was submitted under.
        sizes: int64 [n], bytes of each object [bytes]; -1 where ``failures`` says why, and after
            ``fetch`` where it was not to be read. Not to be written to.
        failures: index in the group → its error in this step. Empty when all went well.
    """

    group: int
    sizes: npt.NDArray[np.int64]
    failures: dict[int, StorageError]


@dataclasses.dataclass(frozen=True)
class Counters:
    """Totals since the storage was opened. Subtract two to get what happened between.

    Attributes:
        metadata_ops: opens, stats and HEADs sent [operations].
        reads: read requests completed [reads].
        bytes_transferred: bytes that arrived from the storage [bytes].
        retries: requests sent again [requests].
        read_seconds: sum over all reads of their duration [s]; divided by wall time it is the
            mean number in flight.
        peak_in_flight: the most reads in flight at once since the last ``reset_peak`` [reads].
        latency: reads by duration; bucket i counts those of [2^(i/4), 2^((i+1)/4)) µs, 128 buckets.
        direct_bytes: bytes read with O_DIRECT [bytes].
        direct_fallback_files: files that wanted O_DIRECT and were read without [files].
        cache_dropped_files: files dropped from the page cache before they were read [files].
        in_flight: reads that are under way now, not a total [reads].
        throttled: calls that the storage answered with "slow down"; where one call asked for
            several objects, it counts once [calls].
    """

    metadata_ops: int = 0
    reads: int = 0
    bytes_transferred: int = 0
    retries: int = 0
    read_seconds: float = 0.0
    peak_in_flight: int = 0
    latency: tuple[int, ...] = (0,) * LATENCY_BUCKETS
    direct_bytes: int = 0
    direct_fallback_files: int = 0
    cache_dropped_files: int = 0
    in_flight: int = 0
    throttled: int = 0


def latency_bucket(seconds: float) -> int:
    """Where ``Counters.latency`` counts a read: ``floor(4 · log2(µs))``, within the table."""
    return bisect.bisect_right(_EDGES, seconds * 1e6)


class BulkReader(Protocol):
    """Asynchronous reads of groups of objects, in two steps.

    ``measure`` opens a group and learns its sizes; the caller finds room; ``fetch`` reads it.
    Nothing blocks: results are collected when ``fileno`` is readable. One thread calls all
    methods (the reader's loop); the storage's own threads or tasks do the work.

    A group is a few dozen to a few thousand objects, numbered by the caller. Each group goes
    through ``measure`` → Progress → ``fetch`` → Progress, or, where its sizes are known already,
    through ``read`` → Progress, or is forgotten with ``discard`` at any
    moment, after which its number is free again and nothing of it is reported any more. Its
    memory is no longer written once ``discard`` has been followed by a True from ``settled``.

    An object that changes while it is read: bytes of one version only. One that has grown gives
    the bytes up to its measured size, one that has shrunk is ``Truncated``, and one that was
    replaced gives its old bytes where the storage still has them, else an error.

    Calls that the protocol does not allow (an unknown group, a place without room, a closed
    storage, a forked child) raise UsageError and change nothing.
    """

    engine: str
    """Named on the receipt: ``native``, ``python``, ``memory``, ``http`` …"""

    def fileno(self) -> int:
        """A descriptor to poll: readable while ``collect`` has something to give.

        It may become so some milliseconds late where more was asked for and is about to finish.
        Also when a discarded group has settled; ``collect`` may then give nothing.
        """
        ...

    def attach(self, memory: memoryview) -> None:
        """The writable memory that ``fetch`` places bytes into. Once, before the first fetch.

        It is exported until ``close``, and for ever when a read is stuck in the operating system.
        """
        ...

    def measure(self, group: int, root: bytes, keys: Keys) -> None:
        """Open the objects ``root``/``keys.key(i)`` and learn their sizes.

        A key that is an absolute path stands by itself; with an empty root all should be. Below an
        object root all keys are relative, also those that begin with a slash; below a bare
        ``scheme://`` all are whole URIs.

        Args:
            group: a number that is not in use.
            root: where the keys are.
            keys: of the objects.
        """
        ...

    def fetch(self, group: int, places: npt.NDArray[np.int64]) -> None:
        """Read the measured group.

        Args:
            group: one that ``collect`` reported as measured.
            places: int64 [n], where in the attached memory object i begins [bytes]; its room is its
                measured size, rounded up to 4096 when ``direct`` (and the place is a multiple
                of 4096 then). ``DROP``: read it all and drop the bytes. ``SKIP``: do not read it
                (it failed to measure, or is not wanted).
        """
        ...

    def read(
        self,
        group: int,
        root: bytes,
        keys: Keys,
        sizes: npt.NDArray[np.int64],
        places: npt.NDArray[np.int64],
    ) -> None:
        """Both steps in one, for objects whose sizes are known.

        An object that has another size now is not read. Of a file Progress then tells the size
        and no failure: it is for the caller to measure the group again. Of an object in a bucket
        what was listed is a promise: it fails as ``Replaced`` or ``Truncated``.

        Args:
            group: a free number.
            root: as for ``measure``.
            keys: as for ``measure``.
            sizes: int64 [n], what each object should have; >= 0 unless it is skipped [bytes].
            places: int64 [n], as for ``fetch``.
        """
        ...

    def returns_at_once(self) -> bool:
        """True while reads return at once, as from a page cache: more in flight would not help."""
        ...

    def discard(self, group: int) -> None:
        """Forget a group: queued operations are dropped, open files closed as soon as possible."""
        ...

    def settled(self, group: int | None = None) -> bool:
        """True when no read of a discarded group is still running: its memory is free.

        Args:
            group: ask for this discarded group only; another one may be stuck for ever.
        """
        ...

    def collect(self) -> list[Progress]:
        """What has finished since the last call; never blocks. Clears ``fileno``'s readiness."""
        ...

    def set_concurrency(self, concurrency: int) -> None:
        """Change the ceiling while running; reads already in flight end as they were begun."""
        ...

    def counters(self) -> Counters:
        """Totals so far."""
        ...

    def reset_peak(self) -> None:
        """Begin a new peak (a new epoch)."""
        ...

    def oldest_read(self) -> tuple[float, str]:
        """Age [s] and key of the operation in flight for longest; ``(0.0, "")`` when none is.

        Operations of discarded groups do not count: nobody waits for them.
        """
        ...

    def close(self) -> None:
        """End the threads and close all files. Never waits for a read that does not return."""
        ...


class Lister(Protocol):
    """Lists what a storage holds below a root."""

    metadata_ops: int
    """Made so far: directories opened and read, or requests [operations]."""

    def list(self, root: bytes) -> Iterator[tuple[bytes, int]]:
        """Yield (key relative to root, size [bytes] or -1 where the listing does not tell)."""
        ...


def open_storage(spec: StorageSpec) -> BulkReader:
    """Make the storage that ``spec`` describes, in this process."""
    if spec.scheme == "file":
        from rayloader.storage.posix import open_posix

        return open_posix(spec)
    if spec.scheme == "memory":
        from rayloader.storage.memory import open_memory

        return open_memory(spec)
    if spec.scheme in ("s3", "az"):
        from rayloader.storage.object import open_objects

        return open_objects(spec)
    if spec.scheme == "any":
        from rayloader.storage.routed import RoutedStorage

        return RoutedStorage(spec)
    from rayloader.errors import OptionError

    raise OptionError(
        f"no storage serves the scheme {spec.scheme!r}; known: file, s3, az, memory, any"
    )
