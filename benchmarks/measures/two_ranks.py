"""Two ranks share the files, hot: does a second reader add what the machine has left?

Method: two rank processes, each with its own reader, begin every epoch at one moment; the rate is
all bytes ÷ (from the common start to the last rank's end). The C reader is one process over all
files.

Command: ``python -m benchmarks.posix --only two-ranks``.

Peers: C (1, 2, 64 threads).
"""

from __future__ import annotations

from benchmarks import lineup
from benchmarks.contender import Stage
from benchmarks.lineup import Setting
from benchmarks.outcome import Outcome, compared
from benchmarks.rounds import race


def run(setting: Setting) -> Outcome:
    """Measure."""
    files = setting.large
    ours = lineup.rayloader(files, ranks=2)
    contenders = [*lineup.c_readers(setting, files), ours]
    with Stage(setting.processes, contenders, files) as stage:
        result = race(stage, setting)
    rows = compared("two ranks", result, ours.name, {"c": 0.85})
    return Outcome("Two ranks, 322 KB files, hot", result, rows, absent=stage.absent)
