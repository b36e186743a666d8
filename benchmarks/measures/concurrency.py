"""One rank, hot, with 1 to 64 reads in flight: 64 must cost nothing where few suffice.

Method: one reader whose ``concurrency`` is set anew for each turn.

Command: ``python -m benchmarks.posix --only concurrency``.

Peers: rayloader itself with 1, 2, 4, 8, 16, 32.
"""

from __future__ import annotations

import dataclasses

from benchmarks import lineup
from benchmarks.contender import Stage
from benchmarks.lineup import Setting
from benchmarks.outcome import Outcome, compared
from benchmarks.rounds import race

FEWER = (1, 2, 4, 8, 16, 32)


def run(setting: Setting) -> Outcome:
    """Measure."""
    files = setting.large
    most = lineup.rayloader(files, concurrency=64)
    fewer = [
        dataclasses.replace(lineup.rayloader(files, concurrency=level), family="rayloader, fewer")
        for level in FEWER
    ]
    with Stage(setting.processes, [*fewer, most], files) as stage:
        result = race(stage, setting)
    targets = {"rayloader, fewer": 0.95}
    rows = compared("concurrency 64", result, most.name, targets)
    return Outcome("Reads in flight, one rank, hot", result, rows, absent=stage.absent)
