"""What an epoch costs before its first read, by the number of ranks and of entries.

Method: a process for each pair, so that its memory is its own. It maps a saved catalog of so many
names and takes the part of the last rank: the digest that ranks compare; then, epoch by epoch, the
time from a request to the first batch, from a storage in memory that has every object; and the time
to order samples in the middle of the epoch. Memory is what the process has of its own
(Private_Dirty) after all that, less what it had when the catalog was not yet open. The driver's
part is the pieces that a Fleet gives to its consumers, made and pickled, by rank.

Command: ``python -m benchmarks.scale --only plan``.

Peers: the same with fewer ranks, and with fewer entries.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
import select
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rayloader.catalog import Catalog
from rayloader.channel.wire import pack_request
from rayloader.config import MIB, Options
from rayloader.fleet.work import Piece
from rayloader.plan import EpochPlan, Shard
from rayloader.reader import Ended, Reader, Ready, Request
from rayloader.storage import open_storage
from rayloader.storage.memory import MemorySpec

RANKS = (1, 8, 64, 256, 1024)
ENTRIES = (10_000, 100_000, 1_000_000, 10_000_000, 50_000_000)
BATCH = 8
"""Samples per batch: 1,024 ranks have one batch each of the least catalog."""
EPOCHS = 15
ORDERED = 1 << 16
"""Samples that are ordered at the most [samples]."""
DIGITS = 8
"""Letters of each name."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of one rank, or of the driver for each rank.

    Attributes:
        ranks: in the run.
        entries: of the catalog.
        open_ms: to map the catalog and know its digest, once in a run [ms].
        start_ms: from a request to the first batch [ms].
        order_ns: to order one sample [ns].
        memory_mb: of the rank's own [MB].
        request_bytes: the request, as it is sent [bytes].
        driver_us: of the driver's time, per rank and epoch [µs].
        driver_bytes: of the driver's memory, per rank and epoch [bytes].
    """

    ranks: int
    entries: int
    open_ms: float
    start_ms: float
    order_ns: float
    memory_mb: float
    request_bytes: int
    driver_us: float
    driver_bytes: float


def run(data: Path, quick: bool) -> list[Cost]:
    """Measure all pairs."""
    entries = ENTRIES[:3] if quick else ENTRIES
    ranks = RANKS[::2] if quick else RANKS
    return [_measured(saved(data, count), many, count) for count in entries for many in ranks]


def saved(data: Path, entries: int) -> Path:
    """A saved catalog of so many names, made where it does not exist yet."""
    path = data / f"names-{entries}.arrow"
    if not path.exists():
        places = 10 ** np.arange(DIGITS - 1, -1, -1)
        letters = np.empty((entries, DIGITS), np.uint8)
        for low in range(0, entries, 1 << 20):
            numbers = np.arange(low, min(low + (1 << 20), entries))
            letters[low : low + len(numbers)] = numbers[:, None] // places % 10 + ord("0")
        ends = np.arange(0, (entries + 1) * DIGITS, DIGITS, dtype=np.int64)
        buffers = [None, pa.py_buffer(ends), pa.py_buffer(letters)]
        names = pa.LargeBinaryArray.from_buffers(pa.large_binary(), entries, buffers)
        Catalog(b"/made", names).save(path)
    return path


def _measured(path: Path, ranks: int, entries: int) -> Cost:
    command = [sys.executable, "-m", "benchmarks.measures.scale_plan", str(path), str(ranks)]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Cost(ranks=ranks, entries=entries, **json.loads(ran.stdout))


class _Everything(Mapping[bytes, bytes]):
    """Every object that is asked for."""

    def __getitem__(self, name: bytes) -> bytes:
        return b"0123456789" * 10

    def __iter__(self) -> Iterator[bytes]:
        return iter(())

    def __len__(self) -> int:
        return 0


def _rank(path: str, ranks: int) -> dict[str, Any]:
    """What one rank pays, in this process."""
    options = Options(batch_size=BATCH, memory_bytes=MIB)
    memory = memoryview(bytearray(options.memory_bytes))
    storage = open_storage(MemorySpec(objects=_Everything()))
    storage.attach(memory)
    reader = Reader(storage, memory, options)
    _order(EpochPlan(ORDERED, Shard(), BATCH))  # what is imported or made once is no epoch's
    own = _own_bytes()

    began = time.perf_counter()
    catalog = Catalog.load(path)
    assert catalog.digest
    opened = time.perf_counter() - began

    def request(epoch: int) -> Request:
        plan = EpochPlan(len(catalog), Shard(ranks - 1, ranks), BATCH, epoch)
        return Request(epoch + 1, epoch, ranks - 1, plan)

    starts = [_start(reader, storage.fileno(), request(epoch), catalog) for epoch in range(EPOCHS)]
    orders = [_order(request(epoch).plan) for epoch in range(3)]
    costs = {
        "open_ms": opened * 1e3,
        "start_ms": statistics.median(starts[1:]) * 1e3,
        "order_ns": min(orders) * 1e9,
        "memory_mb": max(0, _own_bytes() - own) / 1e6,
        "request_bytes": len(pack_request(request(EPOCHS))),
    }
    storage.close()
    return costs | _driver(ranks, len(catalog), options)


def _start(reader: Reader, fd: int, request: Request, catalog: Catalog) -> float:
    """From a request to its first batch [s]; the rest of the epoch is left."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    began = time.perf_counter()
    reader.begin(request, catalog)
    while True:
        for outcome in reader.advance():
            if isinstance(outcome, Ready | Ended):
                seconds = time.perf_counter() - began
                reader.abandon()
                while reader.settling:
                    poll.poll(1)
                    reader.advance()
                return seconds
        poll.poll(100)


def _order(plan: Any) -> float:
    """Time for each sample in the middle of an epoch [s]."""
    steps = min(plan.steps, ORDERED // BATCH)
    first = (plan.steps - steps) // 2
    began = time.perf_counter()
    samples = sum(len(batch) for batch in plan.batches(first, first + steps))
    return (time.perf_counter() - began) / samples


def _driver(ranks: int, entries: int, options: Options) -> dict[str, float]:
    """What a Fleet's driver does for an epoch: a piece for each rank, pickled."""

    def pieces() -> list[bytes]:
        made = [Piece(1, Shard(rank, ranks)) for rank in range(ranks)]
        made[0].plan(entries, options)
        return [pickle.dumps(piece) for piece in made]

    times = []
    for _ in range(5):
        began = time.perf_counter()
        pieces()
        times.append(time.perf_counter() - began)
    tracemalloc.start()
    pieces()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {"driver_us": min(times) / ranks * 1e6, "driver_bytes": peak / ranks}


def _own_bytes() -> int:
    """What this process has written and shares with nobody [bytes]."""
    with open("/proc/self/smaps_rollup") as file:
        (line,) = [line for line in file if line.startswith("Private_Dirty")]
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    print(json.dumps(_rank(sys.argv[1], int(sys.argv[2]))))
