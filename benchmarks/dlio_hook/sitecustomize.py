"""Runs inside each rank of a measured DLIO: takes CPU times, and applies a remedy where asked to.

Python imports it at start-up, because its directory is on PYTHONPATH; DLIO's command stays as its
users type it. With ``BENCH_DLIO_NOTES`` set, rank 0 writes there when training began and ended, and
the CPU time that every process of the run had used until then, dead workers included.

With ``BENCH_DLIO_COLD`` every rank drops the page cache before each epoch's clock (root).

``BENCH_DLIO_REMEDY`` changes mlcommons' fork at run time, in ways that were proposed for it:

``persistent``
    keeps the DataLoader's workers. They go on reading the list of the first epoch: what it measures
    is not the workload.
``threads``
    opens for POSIX the iterable path with 64 threads per worker, which the fork has for object
    storage; workers made anew each epoch, as for POSIX.
"""

import contextlib
import functools
import json
import os
import time

from benchmarks.after_import import after_import

NOTES = os.environ.get("BENCH_DLIO_NOTES")
COLD = os.environ.get("BENCH_DLIO_COLD")
REMEDY = os.environ.get("BENCH_DLIO_REMEDY")
MARK = f"BENCH_DLIO_RUN={os.environ.get('BENCH_DLIO_RUN', '')}".encode()
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds():
    """User and system time of all of this run's processes, and of their children that ended [s]."""
    total = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if MARK not in _read(f"/proc/{pid}/environ").split(b"\0"):
                continue
            fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
            total += sum(map(int, fields[11:15]))
    return total / TICKS


def watch_stats(module):
    """Note the moments and the CPU times at which each epoch's training begins and ends."""
    counter = module.StatsCounter
    for name in ("start_train", "end_train"):
        setattr(counter, name, _noting(name, getattr(counter, name)))
    for name in ("batch_loaded", "batch_processed"):
        setattr(counter, name, _timing(name, getattr(counter, name)))


_SEEN = {"batch_loaded": [], "batch_processed": []}


def _timing(name, original):
    seen = _SEEN[name]

    def method(self, *rest):
        seen.append(time.monotonic())
        return original(self, *rest)

    return method


def _noting(name, original):
    def method(self, epoch, *rest):
        if COLD and name == "start_train":
            with open("/proc/sys/vm/drop_caches", "w") as switch:
                switch.write("3")
        at = time.monotonic()
        if self.my_rank != 0:
            return original(self, epoch, *rest)
        loaded, processed = _SEEN.values()
        line = {
            "event": name,
            "epoch": epoch,
            "at": at,
            "cpu": cpu_seconds(),
            "steps": len(processed),
            "first": loaded[0] if loaded else None,
            "last": processed[-1] if processed else None,
        }
        with open(NOTES, "a") as file:
            file.write(json.dumps(line) + "\n")
        loaded.clear()
        processed.clear()
        return original(self, epoch, *rest)

    return method


def keep_workers(module):
    """``persistent``: the DataLoader as the fork makes it, but its workers are kept."""
    original = module.DataLoader

    def kept(*arguments, **words):
        if words.get("num_workers"):
            words.setdefault("persistent_workers", True)
        return original(*arguments, **words)

    module.DataLoader = kept


class _AsObjectStorage:
    """DLIO's arguments, but for the storage type that decides which path reads."""

    def __init__(self, args, storage_type):
        self.__dict__.update(args=args, storage_type=storage_type)

    def __getattr__(self, name):
        return getattr(self.args, name)

    def __setattr__(self, name, value):
        setattr(self.args, name, value)


def open_threads(module):
    """``threads``: the choice of the path takes POSIX for an object storage; the reader does not.

    Workers are not kept, so that they see each epoch's list; their pool of threads is made in them
    (a pool that is used in the parent and inherited by fork would hang: hence ``spawn``).
    """
    loader, original = module.TorchDataLoader, module.DataLoader
    read = loader.read

    def anew(*arguments, **words):
        words.pop("persistent_workers", None)
        return original(*arguments, **words)

    @functools.wraps(read)
    def opened(self, *rest):
        from dlio_benchmark.common.enumerations import StorageType

        args = self._args
        self._args = _AsObjectStorage(args, StorageType.DIRECT_FS)
        try:
            return read(self, *rest)
        finally:
            self._args = args

    module.DataLoader = anew
    loader.read = opened


def _read(path):
    with open(path, "rb") as file:
        return file.read()


REMEDIES = {"persistent": keep_workers, "threads": open_threads}
CHANGED = {}
if NOTES:
    CHANGED["dlio_benchmark.utils.statscounter"] = watch_stats
if REMEDY:
    CHANGED["dlio_benchmark.data_loader.torch_data_loader"] = REMEDIES[REMEDY]


if CHANGED:
    after_import(CHANGED)
