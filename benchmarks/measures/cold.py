"""One rank reads files that are not in the page cache: the device decides.

Method: before every epoch, outside the clock, the caches are dropped (3 to drop_caches as root,
else posix_fadvise on each file), and mincore on a sample of the files must find nothing.

Command: ``python -m benchmarks.posix --only cold``.

Peers: C with 64 threads; with 1, to show what 64 in flight are worth.
"""

from __future__ import annotations

from benchmarks import lineup
from benchmarks.contender import Stage
from benchmarks.files import make_cold
from benchmarks.lineup import Setting
from benchmarks.outcome import Outcome, Row
from benchmarks.rounds import race


def run(setting: Setting) -> Outcome:
    """Measure."""
    files, paths = setting.large, setting.large.paths()
    contenders = [
        *lineup.c_readers(setting, files, threads=(1, 64)),
        lineup.rayloader(files, concurrency=64),
    ]
    ways: set[str] = set()
    with Stage(setting.processes, contenders, files) as stage:
        result = race(stage, setting, epochs=1, before=lambda: ways.add(make_cold(paths)))
    ours, c64 = contenders[-1].name, contenders[1].name
    rows = []
    if ours in result.values:
        rows.append(Row("cold, 64 in flight", c64, result.ratios(ours, c64), 0.9))
    notes = [f"made cold with {', '.join(ways)}; a sample checked with mincore before every epoch"]
    return Outcome("Cold: caches dropped before each epoch", result, rows, notes, stage.absent)
