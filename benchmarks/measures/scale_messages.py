"""Control-plane messages of a rank and epoch: counted where they are sent.

Method: one rank of so many reads epochs of a catalog of so many entries (a few files named over and
over) through a real reader. Its end of the local channel is a subclass that counts every packet on
the socket, both ways; every call of an actor in this process is counted too. Messages about single
batches (READY, TAKEN, RELEASED) are counted apart: there are as many as batches ask for. Then a
Fleet of several ranks reads, and the driver's calls to its consumers are counted: the orders; and
the questions how far they are, which come by the clock.

Command: ``python -m benchmarks.scale --only messages``.

Peers: the same with fewer ranks, and with fewer entries.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import rayloader
from rayloader import remote
from rayloader.channel.local import LocalChannel, TrainerMemory
from rayloader.channel.wire import Kind
from rayloader.experiment.generate import generate

CELLS = ((1, 2_000), (1, 20_000), (8, 20_000), (64, 200_000), (1024, 200_000), (1024, 2_000_000))
"""Ranks, and entries."""
FLEETS = (1, 2, 4)
EPOCHS = 3
FILES, BATCH = 100, 64
OF_BATCHES = frozenset({"READY", "TAKEN", "RELEASED", "SKIPPED", "BLOCKED"})
ASKED_BY_THE_CLOCK = frozenset({"progress"})


@dataclasses.dataclass(frozen=True)
class Count:
    """Messages of one rank in one epoch.

    Attributes:
        ranks: in the run.
        entries: of the catalog.
        who: ``rank``: a trainer and its reader; ``driver``: of a Fleet, for each rank.
        control: packets and actor calls that steer an epoch.
        batches: delivered [batches].
        of_batches: packets about single batches.
        by_the_clock: calls that come so often in a second, however many ranks there are.
        kinds: of the control messages.
    """

    ranks: int
    entries: int
    who: str
    control: float
    batches: float
    of_batches: float
    by_the_clock: float
    kinds: dict[str, float]


def run(data: Path, quick: bool) -> list[Count]:
    """Count everything."""
    source = data / "hundred"
    if not source.exists():
        generate(source, files=FILES, size=1000, seed=1)
    names = sorted(str(path) for path in source.rglob("*") if path.is_file())
    cells, fleets = (CELLS[:3], FLEETS[:2]) if quick else (CELLS, FLEETS)
    with _counting() as counts:
        found = [_rank(names, *cell, counts) for cell in cells]
        found += [_fleet(names, ranks, counts) for ranks in fleets]
    rayloader.shutdown()
    return found


def _rank(names: list[str], ranks: int, entries: int, counts: collections.Counter[str]) -> Count:
    catalog = rayloader.Catalog.of_files(names * (entries // len(names)))
    with rayloader.RankDataset(catalog, batch_size=BATCH, rank=0, world_size=ranks) as dataset:
        list(dataset)
        counts.clear()
        batches = sum(1 for _ in range(EPOCHS) for _ in dataset)
        return _counted(ranks, entries, "rank", counts, batches, EPOCHS)


def _fleet(names: list[str], ranks: int, counts: collections.Counter[str]) -> Count:
    with rayloader.Fleet(names * 20, ranks=ranks, batch_size=BATCH, progress=False) as fleet:
        fleet.run_epoch()
        counts.clear()
        reports = [fleet.run_epoch() for _ in range(EPOCHS)]
        batches = sum(report.steps for report in reports)
        # A few reads are made apart after an epoch, to name its limit: once in a Fleet's life.
        counts.pop("read_alone", None)
        return _counted(ranks, 20 * len(names), "driver", counts, batches, EPOCHS * ranks)


def _counted(
    ranks: int,
    entries: int,
    who: str,
    counts: collections.Counter[str],
    batches: int,
    times: int,
) -> Count:
    kinds = {
        name: count / times
        for name, count in sorted(counts.items())
        if name not in OF_BATCHES | ASKED_BY_THE_CLOCK
    }
    return Count(
        ranks,
        entries,
        who,
        sum(kinds.values()),
        batches / times,
        sum(counts[name] for name in OF_BATCHES) / times,
        sum(counts[name] for name in ASKED_BY_THE_CLOCK) / times,
        kinds,
    )


@contextlib.contextmanager
def _counting() -> Iterator[collections.Counter[str]]:
    """Count what this process sends to readers and other actors, and what readers send to it."""
    import ray.actor

    counts: collections.Counter[str] = collections.Counter()

    class Counting(LocalChannel):
        def _say(self, kind: Kind, *fields: int, payload: bytes = b"") -> None:
            counts[kind.name] += 1
            super()._say(kind, *fields, payload=payload)

        def _next_packet(self, on_wait: Any) -> tuple[Kind, tuple[int, ...], bytes]:
            packet = super()._next_packet(on_wait)
            counts[packet[0].name] += 1
            return packet

    call, release = ray.actor.ActorMethod._remote, TrainerMemory.release

    def counted_call(self: Any, *arguments: Any, **named: Any) -> Any:
        counts[self._method_name] += 1
        return call(self, *arguments, **named)

    def counted_release(self: TrainerMemory, generation: int, table_at: int) -> None:
        counts["RELEASED"] += 1
        release(self, generation, table_at)

    remote.LocalChannel = Counting  # type: ignore[misc]
    ray.actor.ActorMethod._remote = counted_call
    TrainerMemory.release = counted_release  # type: ignore[method-assign]
    try:
        yield counts
    finally:
        remote.LocalChannel = LocalChannel  # type: ignore[misc]
        ray.actor.ActorMethod._remote = call
        TrainerMemory.release = release  # type: ignore[method-assign]
