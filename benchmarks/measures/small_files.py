"""One rank reads 20,000 files of 10,000 bytes in batches of 256: the cost per file decides.

Method: as one_rank.py, in files per second.

Command: ``python -m benchmarks.posix --only small-files``.

Peers: C (1, 2, 64 threads); torch ``DataLoader`` in-process and with 1, 2, 4 persistent workers.
Each is held against twice: in its quickest form, and ``plain``, as it is commonly written.
Uncollated (``list``), a worker makes a shared-memory object of every sample, and is far slower.
"""

from __future__ import annotations

from benchmarks import lineup
from benchmarks.contender import Stage
from benchmarks.lineup import Setting
from benchmarks.outcome import Outcome, compared
from benchmarks.rounds import race, thousand_files_per_second


def run(setting: Setting) -> Outcome:
    """Measure."""
    files = setting.small
    contenders = [
        *lineup.c_readers(setting, files),
        lineup.rayloader(files),
        *(lineup.torch_in_process(files, collate) for collate in ("list", "stack")),
        *(lineup.torch_workers(files, workers, "flat") for workers in (1, 2, 4)),
        *(lineup.torch_plain(files, workers) for workers in (0, 2)),
    ]
    if not setting.quick:
        contenders += [lineup.torch_workers(files, workers, "stack") for workers in (1, 2, 4)]
        contenders += [lineup.torch_plain(files, workers) for workers in (1, 4)]
        contenders.append(lineup.torch_workers(files, 2, "list"))
    with Stage(setting.processes, contenders, files) as stage:
        result = race(stage, setting, unit="1000 files/s", value=thousand_files_per_second)
    rows = compared(
        "10 KB files",
        result,
        "rayloader",
        {
            "c": 0.5,
            "torch in-process": 3.0,
            "torch plain, in-process": 3.0,
            "torch workers": 7.0,
            "torch plain, workers": 7.0,
        },
    )
    return Outcome("20,000 files of 10 KB, hot", result, rows, absent=stage.absent)
