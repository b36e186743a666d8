"""Files of a mounted file system, read in bulk by an engine with threads of its own.

Two engines do the same: ``native`` (C, never holds the GIL) and ``python``. This module chooses
one, sizes it for this process, and turns its numbers into typed errors.
"""

from __future__ import annotations

import logging
import os
import resource
import weakref
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rayloader import errors
from rayloader.config import DESCRIPTORS_KEPT, PAGE, READS_END_SECONDS
from rayloader.storage import Counters, Keys, Progress, StorageSpec
from rayloader.storage._python import FileCode

_log = logging.getLogger(__name__)

_CAUSES: dict[int, tuple[type[errors.StorageError], str]] = {
    FileCode.NOT_REGULAR: (errors.NotRegularFile, "not a regular file"),
    FileCode.TRUNCATED: (errors.Truncated, "ended before its measured size"),
    FileCode.NO_DIRECT: (errors.DirectUnsupported, "O_DIRECT is refused here"),
    FileCode.REPLACED: (errors.StorageError, "replaced by another file while it was read"),
    FileCode.BAD_NAME: (errors.StorageError, "a file name cannot contain a NUL byte"),
}


class Engine(Protocol):
    """What ``_native.Engine`` and ``_python.Engine`` both are. Groups and files by number.

    Misuse raises UsageError; so does an engine that is closed or was inherited by a fork.
    """

    def fileno(self) -> int:
        """Readable while ``collect`` has something, or when ``settled`` turned true."""
        ...

    def attach(self, memory: memoryview, /) -> None:
        """Keep a view of the memory until closed; longer if a thread is stuck in a read."""
        ...

    def measure(
        self, group: int, root: bytes, blob: bytes, offsets: npt.NDArray[np.int64], /
    ) -> None:
        """Queue a group for open and fstat."""
        ...

    def fetch(self, group: int, places: npt.NDArray[np.int64], /) -> None:
        """Queue a measured group for reading."""
        ...

    def read(
        self,
        group: int,
        root: bytes,
        blob: bytes,
        offsets: npt.NDArray[np.int64],
        sizes: npt.NDArray[np.int64],
        places: npt.NDArray[np.int64],
        /,
    ) -> None:
        """Queue a group of files of known sizes for reading; one of another size is not read."""
        ...

    def discard(self, group: int, /) -> None:
        """Forget a group."""
        ...

    def settled(self, group: int | None = None, /) -> bool:
        """True when no read of a discarded group (of this one) is running."""
        ...

    def collect(self) -> list[tuple[int, bytes, bytes | None]]:
        """(group, int64 sizes, int32 codes or None when all are 0) of what has finished."""
        ...

    def is_calm(self) -> bool:
        """Operations return at once, so that more of them in flight would not help."""
        ...

    def counters(self) -> tuple[Any, ...]:
        """The fields of ``Counters``, in their order."""
        ...

    def reset_peak(self) -> None:
        """Begin a new peak."""
        ...

    def set_concurrency(self, concurrency: int, scratch_part_bytes: int, /) -> None:
        """Change the ceiling, and the length of the ranges that are dropped with it."""
        ...

    def oldest(self) -> tuple[float, bytes]:
        """Age [s] and name of the operation in flight for longest."""
        ...

    def close(self, grace: float = ..., /) -> int:
        """End the threads; how many were left behind in a system call after ``grace`` [s]."""
        ...


def open_posix(spec: StorageSpec) -> PosixStorage:
    """Open the engine that ``spec`` asks for; ``auto`` prefers the native one.

    Raises:
        OptionError: ``engine="native"`` where the extension was not built.
    """
    return PosixStorage(spec, *_engine_class(spec.engine))


class PosixStorage:
    """A ``BulkReader`` of files. Keys are paths relative to the root, or absolute."""

    def __init__(self, spec: StorageSpec, engine: str, engine_class: type[Any]) -> None:
        self.engine = engine
        self._spec = spec
        self._measured: dict[int, tuple[bytes, Keys]] = {}
        self._fetching: dict[int, tuple[bytes, Keys]] = {}
        concurrency, fd_budget = _within_descriptors(spec.concurrency)
        self._core: Engine = engine_class(
            concurrency=concurrency,
            cpus=_cpus(),
            part_bytes=spec.part_bytes,
            scratch_part_bytes=_scratch_part(spec, concurrency),
            direct=2 if spec.direct == "fallback" else int(spec.direct),
            drop_cache=spec.drop_cache,
            fd_budget=fd_budget,
        )
        # Also without close, and when the interpreter ends: threads must not outlive their owner.
        self._end = weakref.finalize(self, self._core.close, READS_END_SECONDS)

    def fileno(self) -> int:
        """See ``BulkReader``."""
        return self._core.fileno()

    def attach(self, memory: memoryview) -> None:
        """See ``BulkReader``. The memory stays exported until ``close``."""
        self._core.attach(memory)

    def measure(self, group: int, root: bytes, keys: Keys) -> None:
        """See ``BulkReader``."""
        self._core.measure(group, root, keys.blob, keys.offsets)
        self._measured[group] = (root, keys)

    def fetch(self, group: int, places: npt.NDArray[np.int64]) -> None:
        """See ``BulkReader``."""
        self._core.fetch(group, places)
        self._fetching[group] = self._measured.pop(group)

    def read(
        self,
        group: int,
        root: bytes,
        keys: Keys,
        sizes: npt.NDArray[np.int64],
        places: npt.NDArray[np.int64],
    ) -> None:
        """See ``BulkReader``."""
        self._core.read(group, root, keys.blob, keys.offsets, sizes, places)
        self._fetching[group] = (root, keys)

    def returns_at_once(self) -> bool:
        """See ``BulkReader``."""
        return self._core.is_calm()

    def discard(self, group: int) -> None:
        """See ``BulkReader``."""
        self._core.discard(group)
        self._measured.pop(group, None)
        self._fetching.pop(group, None)

    def settled(self, group: int | None = None) -> bool:
        """See ``BulkReader``."""
        return self._core.settled(group)

    def collect(self) -> list[Progress]:
        """See ``BulkReader``."""
        return [self._progress(*one) for one in self._core.collect()]

    def set_concurrency(self, concurrency: int) -> None:
        """See ``BulkReader``."""
        self._core.set_concurrency(concurrency, _scratch_part(self._spec, concurrency))

    def counters(self) -> Counters:
        """See ``BulkReader``."""
        return Counters(*self._core.counters())

    def reset_peak(self) -> None:
        """See ``BulkReader``."""
        self._core.reset_peak()

    def oldest_read(self) -> tuple[float, str]:
        """See ``BulkReader``."""
        age, key = self._core.oldest()
        return age, os.fsdecode(key)

    def close(self) -> None:
        """See ``BulkReader``. Idempotent."""
        left = self._end()
        self._measured.clear()
        self._fetching.clear()
        if left:
            _log.warning("%d reads did not return; their threads were left behind", left)

    def _progress(self, group: int, sizes: bytes, codes: bytes | None) -> Progress:
        known = self._fetching.pop if group in self._fetching else self._measured.__getitem__
        root, keys = known(group)
        failures = {}
        if codes is not None:
            numbers = np.frombuffer(codes, np.int32)
            for i in np.flatnonzero(numbers).tolist():
                failures[i] = _failure(root, keys.key(i), int(numbers[i]))
        return Progress(group, np.frombuffer(sizes, np.int64), failures)


def _failure(root: bytes, key: bytes, code: int) -> errors.StorageError:
    """The typed error for an engine's code, under the key's own name."""
    name = os.fsdecode(key)
    if code > 0:
        error = errors.storage_error(name, code)
    else:
        kind, cause = _CAUSES[code]
        error = kind(name, cause)
    if root and not key.startswith(b"/"):
        error.add_note(f"below {errors.printable(os.fsdecode(root))}")
    return error


def _engine_class(wanted: str) -> tuple[str, type[Any]]:
    if wanted != "python":
        try:
            from rayloader.storage import _native

            return "native", _native.Engine
        except ImportError as error:
            if wanted == "native":
                raise errors.OptionError(
                    "engine='native' needs the C extension rayloader.storage._native, which was "
                    "not built: reinstall rayloader where a C compiler (gcc, Python headers) "
                    "is at hand, or take engine='python'"
                ) from error
    from rayloader.storage import _python

    return "python", _python.Engine


def _scratch_part(spec: StorageSpec, concurrency: int) -> int:
    """Length of the ranges of objects that are dropped: all buffers stay within the bound."""
    return max(PAGE, min(spec.part_bytes, spec.scratch_bytes // concurrency) // PAGE * PAGE)


def _within_descriptors(concurrency: int) -> tuple[int, int]:
    """The concurrency that this process has descriptors for, and how many files may stay open."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return concurrency, 1 << 20
    # The limit is on numbers: what was opened above it, before it was lowered, takes no place.
    free = limit - sum(int(fd) < limit for fd in os.listdir("/proc/self/fd"))
    possible = max(1, min(concurrency, free - DESCRIPTORS_KEPT // 4))
    if possible < concurrency:
        _log.warning(
            "RLIMIT_NOFILE=%d: %d reads in flight instead of %d", limit, possible, concurrency
        )
    return possible, max(0, free - possible - DESCRIPTORS_KEPT)


def _cpus() -> int:
    """CPUs that this process may use: its mask, and its cgroup's quota."""
    cgroup = ""
    try:
        with open("/proc/self/cgroup") as lines:
            cgroup = next((line.strip()[3:] for line in lines if line.startswith("0::")), "")
    except OSError:
        pass  # no /proc, no quota that we know of
    quota = cgroup_cpus("/sys/fs/cgroup", cgroup)
    return max(1, min(len(os.sched_getaffinity(0)), quota))


def cgroup_cpus(mount: str, cgroup: str) -> int:
    """The least CPU quota from a cgroup (v2) up to the root, rounded up [CPUs]."""
    least = 1 << 20
    while True:
        try:
            with open(f"{mount}{cgroup}/cpu.max") as file:
                quota, period = file.read().split()
            if quota != "max":
                least = min(least, -(-int(quota) // int(period)))
        except (OSError, ValueError):
            pass  # the root has no such file; a container may hide the others
        if cgroup in ("", "/"):
            return least
        cgroup = os.path.dirname(cgroup)
