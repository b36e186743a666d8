"""Whether 64 in flight are 64 in flight: a storage whose every read takes 5 ms.

Method: the reader (without Ray, and without a trainer's work) over objects of 100 bytes in memory,
which come 5 ms after they were asked for, as many at once as the concurrency allows. Reads per
second with 64 in flight, divided by those with 1, in turns. The receipt's peak is checked.

Command: ``python -m benchmarks.posix --only latency``.

Peers: the same reader with one read in flight.
"""

from __future__ import annotations

import select
import time

import numpy as np
import pyarrow as pa

from benchmarks.lineup import Setting
from benchmarks.outcome import Outcome, Row
from benchmarks.rounds import Race
from rayloader.catalog import Catalog
from rayloader.config import MIB, Options
from rayloader.plan import EpochPlan, Shard
from rayloader.reader import Ended, Reader, ReaderCounts, Ready, Request
from rayloader.storage import BulkReader, open_storage
from rayloader.storage.memory import MemorySpec

LATENCY = 0.005
"""Duration of every read [s]."""
READS = {1: 100, 64: 6400}
"""Concurrency → reads per turn: half a second each, if the promise holds."""


def run(setting: Setting) -> Outcome:
    """Measure."""
    rates: dict[str, list[float]] = {f"{count} in flight": [] for count in READS}
    for _ in range(setting.rounds):
        for concurrency, reads in READS.items():
            rates[f"{concurrency} in flight"].append(_rate(concurrency, reads))
    one, many = rates.values()
    ratios = [b / a for a, b in zip(one, many, strict=True)]
    result = Race("reads/s", rates, dict.fromkeys(rates, "rayloader"))
    row = Row("reads/s at 5 ms latency, 64 in flight", "1 in flight", ratios, 50)
    return Outcome("A storage with 5 ms latency", result, [row], [], {})


def _rate(concurrency: int, reads: int) -> float:
    objects = {b"%06d" % number: bytes(100) for number in range(reads)}
    options = Options(batch_size=24, concurrency=concurrency, memory_bytes=4 * MIB)
    memory = memoryview(bytearray(options.memory_bytes))
    storage = open_storage(MemorySpec(objects=objects, latency=LATENCY, concurrency=concurrency))
    storage.attach(memory)
    reader = Reader(storage, memory, options)
    catalog = Catalog(b"", pa.array(sorted(objects), pa.large_binary()))
    plan = EpochPlan(reads, Shard(), options.batch_size)
    began = time.perf_counter()
    reader.begin(Request(1, 0, 0, plan), catalog)
    _drain(reader, storage)
    seconds = time.perf_counter() - began
    storage.close()
    peak = ReaderCounts.of(np.frombuffer(memory, np.int64, 512)).peak_in_flight
    if peak != concurrency:
        raise RuntimeError(f"{peak} reads were in flight, {concurrency} were asked for")
    return reads / seconds


def _drain(reader: Reader, storage: BulkReader) -> None:
    poll = select.poll()
    poll.register(storage.fileno(), select.POLLIN)
    while True:
        for outcome in reader.advance():
            if isinstance(outcome, Ended):
                return
            if isinstance(outcome, Ready):
                reader.released(1, outcome.table_at)
        poll.poll(100)
