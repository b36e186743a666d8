"""One rank reads 2,000 files of 322,624 bytes, page cache hot, beside every peer.

Method: rounds (see rounds.py); every contender shuffles and delivers all files in each epoch, and
its bytes were checked once. The C reader's figure is its best number of threads into the arena;
with a small reused buffer it is shown beside.

Command: ``python -m benchmarks.posix --only one-rank``.

Peers: C (1, 2, 64 threads); torch ``DataLoader`` in-process and with 1, 2, 4 persistent workers;
the same ``plain``, as commonly written; ``__getitems__`` with 64 threads and 0, 1, 2 workers; SPDL
with a task per file or per batch.
"""

from __future__ import annotations

from benchmarks import lineup
from benchmarks.contender import Contender, Stage
from benchmarks.lineup import Setting
from benchmarks.outcome import Outcome, compared
from benchmarks.rounds import race


def run(setting: Setting) -> Outcome:
    """Measure."""
    contenders = _contenders(setting)
    with Stage(setting.processes, contenders, setting.large) as stage:
        result = race(stage, setting)
    rows = compared(
        "one rank",
        result,
        "rayloader",
        {
            "c": 0.75,
            "torch workers": 5.0,
            "torch plain, workers": 5.0,
            "torch in-process": 1.5,
            "torch in-process, malloc tuned": 1.5,
            "torch plain, in-process": 1.5,
            "torch __getitems__": 4.0,
            "SPDL per file": 4.0,
            "SPDL per batch": 4.0,
        },
    )
    return Outcome("One rank, 322 KB files, hot", result, rows, absent=stage.absent)


def _contenders(setting: Setting) -> list[Contender]:
    files = setting.large
    chosen = [
        *lineup.c_readers(setting, files),
        lineup.rayloader(files),
        *(lineup.torch_in_process(files, collate) for collate in ("list", "stack", "flat")),
        *(lineup.torch_in_process_tuned(files, collate) for collate in ("list", "stack")),
        *(lineup.torch_workers(files, workers, "stack") for workers in (1, 2, 4)),
        *(lineup.torch_getitems(files, workers) for workers in (0, 2)),
        lineup.spdl(files, 8, "file"),
        lineup.spdl(files, 2, "batch"),
        *(lineup.torch_plain(files, workers) for workers in (0, 2)),
    ]
    if not setting.quick:
        chosen += [
            *lineup.c_readers(setting, files, into="small"),
            *(lineup.torch_workers(files, workers, "flat") for workers in (1, 2, 4)),
            lineup.torch_workers(files, 2, "stack", start_method="spawn"),
            *(lineup.torch_plain(files, workers) for workers in (1, 4)),
            lineup.torch_getitems(files, 1),
            lineup.spdl(files, 64, "file"),
            lineup.spdl(files, 4, "batch"),
        ]
    return chosen
