"""What a Fleet of 1 to 8 ranks reads from a storage whose every answer takes 5 ms.

Method: 4,800 objects of 1 KB from a server on this machine (``slow_server.py``), four requests in
flight per rank: latency bounds a rank at 800 objects/s, and ranks add up until the CPUs, which
server, readers and consumers share, are used up. In each round the Fleet grows from one rank to
eight; each number has a warm-up epoch, which does not count, and one that does. Ratios are taken
within a round. Beside the rate stands how busy the machine's CPUs were, whoever used them.

Command: ``python -m benchmarks.scale --only fleet``.

Peers: the same Fleet with one rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import rayloader
from rayloader.experiment.generate import generate
from rayloader.fleet.report import EpochReport
from tests.s3.servers import credentials

LATENCY = 0.005
"""Between a request and its answer [s]."""
OBJECTS, SIZE = 4_800, 1_000
CONCURRENCY, BATCH = 4, 24
RANKS = (1, 2, 3, 4, 6, 8)


@dataclasses.dataclass(frozen=True)
class Rate:
    """Of a Fleet.

    Attributes:
        ranks: how many.
        files_per_second: in each round [objects/s].
        busy: of all CPUs, the median over the rounds [0..1].
        limit: what the report of the last round names.
    """

    ranks: int
    files_per_second: list[float]
    busy: float
    limit: str


def run(data: Path, quick: bool) -> list[Rate]:
    """Measure every number of ranks."""
    bucket = data / "small-objects"
    if not bucket.exists():
        generate(bucket, files=OBJECTS, size=SIZE, seed=1)
    ranks = RANKS[:3] if quick else RANKS
    reports: dict[int, list[EpochReport]] = {many: [] for many in ranks}
    with _server(data) as endpoint:
        os.environ.update(credentials(endpoint))
        with rayloader.Fleet(
            _catalog(bucket),
            concurrency=CONCURRENCY,
            batch_size=BATCH,
            endpoint_url=endpoint,
            progress=False,
            start_timeout=300.0,
        ) as fleet:
            for _ in range(rounds(quick)):
                for many in ranks:
                    fleet.scale(many)
                    fleet.run_epoch()
                    reports[many].append(fleet.run_epoch())
    rayloader.shutdown()
    return [_rate(many, of) for many, of in reports.items()]


def rounds(quick: bool) -> int:
    """How often the Fleet grows from one rank."""
    return 2 if quick else 5


def _catalog(bucket: Path) -> rayloader.Catalog:
    """What is in the bucket, with sizes: one request for each object, and no listing."""
    listed = rayloader.Catalog.from_source(bucket, stat=True)
    return rayloader.Catalog(f"s3://{bucket.name}".encode(), listed.keys, listed.sizes)


def _rate(ranks: int, reports: list[EpochReport]) -> Rate:
    return Rate(
        ranks,
        [report.files_per_second for report in reports],
        statistics.median(report.evidence.node_busy for report in reports),
        reports[-1].limit.name,
    )


@contextlib.contextmanager
def _server(data: Path) -> Iterator[str]:
    """The server's process, over all of ``data``; its endpoint."""
    command = [sys.executable, "-m", "benchmarks.slow_server", str(data), str(LATENCY)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        yield process.stdout.readline().strip()
        process.stdin.close()
