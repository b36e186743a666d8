"""One rank, hot, beside Ray Data, which also reads with Ray.

Method: as one_rank.py, in fewer rounds (an epoch of Ray Data takes seconds, not milliseconds).
Batches are taken in Arrow's format, which spares the conversion to Python bytes.

Command: ``python -m benchmarks.posix --only ray-data``.

Peers: Ray Data ``read_binary_files`` → ``iter_batches``.
"""

from __future__ import annotations

import dataclasses

from benchmarks import lineup
from benchmarks.contender import Stage
from benchmarks.lineup import Setting
from benchmarks.outcome import Outcome, compared
from benchmarks.rounds import race


def run(setting: Setting) -> Outcome:
    """Measure."""
    files = setting.large
    few = dataclasses.replace(setting, rounds=1 if setting.quick else 3)
    with Stage(
        setting.processes, [lineup.rayloader(files), lineup.ray_data(files)], files, warm_epochs=1
    ) as stage:
        result = race(stage, few)
    rows = compared("one rank", result, "rayloader", {"Ray Data": 40.0})
    return Outcome("One rank beside Ray Data", result, rows, absent=stage.absent)
