"""s3dlio alone, in a process without torch: the bytes arrive and are dropped.

Method: one process that answers orders as peers.py does, and keeps 64 GETs in flight all the time:
so many calls overlap that one which ends leaves the others full. ``get_many`` is called from
threads with ``max_in_flight=64`` in all; ``get_into`` runs 64 tasks, each with a buffer of its own
that is used over and over. Nothing is put in order, nothing is kept.

Command: ``python -m benchmarks.raw_s3dlio uris=LISTING``; then lines ``epochs=3 form=get_many
calls=8 trainer=count``. Its answers carry the process's CPU time [s].
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.files import WORD, sample_digest

IN_FLIGHT = 64
os.environ["S3DLIO_ENABLE_RANGE_OPTIMIZATION"] = "0"  # one GET for each object, and no HEAD
sys.modules["torch"] = None  # type: ignore[assignment]  # s3dlio imports it where it is installed
import s3dlio  # noqa: E402

Seen = Callable[[Any], None]


class Sink:
    """Counts what arrives, and drops it."""

    def __init__(self, work: str) -> None:
        self.files = self.bytes = self.digest = 0
        self._verify = work == "verify"
        self._lock = threading.Lock()

    def take(self, bodies: Sequence[Any]) -> None:
        """Some objects' bytes."""
        with self._lock:
            self.files += len(bodies)
            self.bytes += sum(map(len, bodies))
            if self._verify:
                contents = (np.frombuffer(body, np.uint8) for body in bodies)
                shares = sum(sample_digest(content) for content in contents)
                self.digest = (self.digest + shares) & WORD


def get_many(uris: list[str], sink: Sink, *, calls: int, size: int) -> None:
    """So many threads, each with one call after the other."""
    each = IN_FLIGHT // calls
    chunks = _cut(uris, each)
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                chunk = next(chunks, None)
            if chunk is None:
                return
            sink.take([body for _, body in s3dlio.get_many(chunk, max_in_flight=each)])

    threads = [threading.Thread(target=work) for _ in range(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


async def get_many_async(uris: list[str], sink: Sink, *, calls: int, size: int) -> None:
    """The same with tasks instead of threads."""
    each = IN_FLIGHT // calls
    chunks = _cut(uris, each)

    async def work() -> None:
        for chunk in chunks:
            got = await s3dlio.get_many_async(chunk, max_in_flight=each)
            sink.take([body for _, body in got])

    await asyncio.gather(*(work() for _ in range(calls)))


async def get_into(uris: list[str], sink: Sink, *, calls: int, size: int) -> None:
    """One task for each GET in flight, with a buffer of its own."""
    left = iter(uris)

    async def work(room: memoryview) -> None:
        for uri in left:
            await s3dlio.get_into_async(uri, room, expected_len=size)
            sink.take([room])

    await asyncio.gather(*(work(room) for room in _rooms(size)))


_kept: list[memoryview] = []


def _rooms(size: int) -> list[memoryview]:
    if not _kept:
        _kept.extend(memoryview(bytearray(size)) for _ in range(IN_FLIGHT))
    return _kept


FORMS: dict[str, Callable[..., Any]] = {
    "get_many": get_many,
    "get_many_async": get_many_async,
    "get_into": get_into,
}


def main() -> None:
    """Answer orders until standard input ends."""
    words = dict(word.split("=", 1) for word in sys.argv[1:])
    uris, size = Path(words["uris"]).read_text().splitlines(), int(words["size"])
    _say({"ready": True})
    numbers = itertools.count()
    with asyncio.Runner() as loop:
        for line in sys.stdin:
            order = dict(word.split("=", 1) for word in line.split())
            for _ in range(int(order["epochs"])):
                _say(
                    _epoch(loop, random.Random(next(numbers)).sample(uris, len(uris)), size, order)
                )


def _epoch(
    loop: asyncio.Runner, uris: list[str], size: int, order: dict[str, str]
) -> dict[str, Any]:
    sink = Sink(order.get("trainer", "count"))
    form, calls = FORMS[order["form"]], int(order.get("calls", IN_FLIGHT))
    begin, cpu = time.monotonic(), time.process_time()
    done = form(uris, sink, calls=calls, size=size)
    if done is not None:
        loop.run(done)
    last = time.monotonic()
    facts = {"cpu_reader": time.process_time() - cpu}
    return {
        "files": sink.files, "bytes": sink.bytes, "begin": begin, "last": last,
        "digest": sink.digest, "facts": facts,
    }  # fmt: skip


def _cut(uris: list[str], length: int) -> Iterator[list[str]]:
    return (uris[at : at + length] for at in range(0, len(uris), length))


def _say(answer: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
