"""Files and objects behind one ``BulkReader``: each group goes where its root points."""

from __future__ import annotations

import dataclasses
import os
import select

import numpy as np
import numpy.typing as npt

from rayloader.errors import UsageError
from rayloader.storage import BulkReader, Counters, Keys, Progress, StorageSpec, open_storage
from rayloader.storage.uri import is_object, scheme_of


class RoutedStorage:
    """Reads files, and objects as soon as there are any to read.

    For a reader that is told what to read epoch by epoch. The numbers of groups are shared.

    Attributes:
        engine: what reads files.
    """

    def __init__(self, spec: StorageSpec) -> None:
        """Open the storage of files; that of objects is opened when a root asks for it."""
        self._spec = spec
        self._served: dict[str, BulkReader] = {}
        self._of_group: dict[int, BulkReader] = {}
        self._memory: memoryview | None = None
        self._poll = select.epoll()
        self._closed = False
        self.engine = self._serving(b"/").engine

    def fileno(self) -> int:
        """See ``BulkReader``: readable while any of its storages is."""
        self._check()
        return self._poll.fileno()

    def attach(self, memory: memoryview) -> None:
        """See ``BulkReader``."""
        self._check()
        if self._memory is not None:
            raise UsageError("memory is attached already")
        self._memory = memory
        for storage in self._served.values():
            storage.attach(memory)

    def measure(self, group: int, root: bytes, keys: Keys) -> None:
        """See ``BulkReader``."""
        self._check()
        storage = self._serving(root)
        storage.measure(group, root, keys)
        self._of_group[group] = storage

    def fetch(self, group: int, places: npt.NDArray[np.int64]) -> None:
        """See ``BulkReader``."""
        self._check()
        if group not in self._of_group:
            raise UsageError(f"group {group} is not a measured one")
        self._of_group[group].fetch(group, places)

    def read(
        self,
        group: int,
        root: bytes,
        keys: Keys,
        sizes: npt.NDArray[np.int64],
        places: npt.NDArray[np.int64],
    ) -> None:
        """See ``BulkReader``."""
        self._check()
        storage = self._serving(root)
        storage.read(group, root, keys, sizes, places)
        self._of_group[group] = storage

    def returns_at_once(self) -> bool:
        """See ``BulkReader``: all of its storages do."""
        self._check()
        return all(storage.returns_at_once() for storage in self._served.values())

    def discard(self, group: int) -> None:
        """See ``BulkReader``."""
        self._check()
        storage = self._of_group.pop(group, None)
        if storage is not None:
            storage.discard(group)

    def settled(self, group: int | None = None) -> bool:
        """See ``BulkReader``."""
        self._check()
        return all(storage.settled(group) for storage in self._served.values())

    def collect(self) -> list[Progress]:
        """See ``BulkReader``."""
        self._check()
        return [progress for storage in self._served.values() for progress in storage.collect()]

    def set_concurrency(self, concurrency: int) -> None:
        """See ``BulkReader``."""
        self._check()
        self._spec = dataclasses.replace(self._spec, concurrency=concurrency)
        for storage in self._served.values():
            storage.set_concurrency(concurrency)

    def counters(self) -> Counters:
        """See ``BulkReader``: all storages together."""
        self._check()
        return _sum([storage.counters() for storage in self._served.values()])

    def reset_peak(self) -> None:
        """See ``BulkReader``."""
        self._check()
        for storage in self._served.values():
            storage.reset_peak()

    def oldest_read(self) -> tuple[float, str]:
        """See ``BulkReader``."""
        self._check()
        return max((storage.oldest_read() for storage in self._served.values()), default=(0.0, ""))

    def close(self) -> None:
        """See ``BulkReader``. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for storage in self._served.values():
            storage.close()
        self._poll.close()

    def _check(self) -> None:
        if self._closed:
            raise UsageError("the storage is closed")

    def _serving(self, root: bytes) -> BulkReader:
        """The storage that serves a root, opened if it is the first such root."""
        scheme = os.fsdecode(scheme_of(root)) if is_object(root) else "file"
        if scheme not in self._served:
            storage = open_storage(dataclasses.replace(self._spec, scheme=scheme))
            if self._memory is not None:
                storage.attach(self._memory)
            self._poll.register(storage.fileno(), select.EPOLLIN)
            self._served[scheme] = storage
        return self._served[scheme]


def _sum(counters: list[Counters]) -> Counters:
    """Totals of several storages; the peak is the highest of them, not of their sum."""
    total = Counters()
    for count in counters:
        values = {
            field.name: getattr(total, field.name) + getattr(count, field.name)
            for field in dataclasses.fields(Counters)
            if field.name not in ("latency", "peak_in_flight")
        }
        latency = tuple(a + b for a, b in zip(total.latency, count.latency, strict=True))
        peak = max(total.peak_in_flight, count.peak_in_flight)
        total = Counters(**values, latency=latency, peak_in_flight=peak)
    return total
