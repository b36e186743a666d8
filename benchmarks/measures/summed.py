"""One rank, hot, and the trainer sums every byte of every sample: loading and work overlap or not.

Method: as one_rank.py; the trainer's step is ``torch.sum(sample, dtype=torch.int64)``, about 5 GB/s
on one core, on both sides. rayloader and torch in-process may use one thread or two for the sum,
and the better one counts (with workers every core is taken, and a second thread only costs).

Command: ``python -m benchmarks.posix --only summed``.

Peers: torch ``DataLoader`` in-process and with 1, 2, 4 persistent workers.
"""

from __future__ import annotations

import dataclasses

from benchmarks import lineup
from benchmarks.contender import Contender, Stage
from benchmarks.lineup import Setting
from benchmarks.outcome import Outcome, compared
from benchmarks.rounds import race


def run(setting: Setting) -> Outcome:
    """Measure."""
    files = setting.large
    plain = [
        lineup.rayloader(files),
        *(lineup.torch_in_process(files, collate) for collate in ("list", "stack")),
        *(lineup.torch_workers(files, workers, "stack") for workers in (1, 2, 4)),
    ]
    contenders = [_summing(contender, 1) for contender in plain]
    if not setting.quick:
        contenders += [_summing(contender, 2) for contender in plain[:3]]
    with Stage(setting.processes, contenders, files) as stage:
        result = race(stage, setting)
    rows = compared(
        "each byte summed",
        result,
        result.best("rayloader") or "rayloader",
        {
            "torch workers": 2.0,
            "torch in-process": 1.3,
        },
    )
    return Outcome("One rank, the trainer sums every byte", result, rows, absent=stage.absent)


def _summing(contender: Contender, threads: int) -> Contender:
    return dataclasses.replace(
        contender,
        name=f"{contender.name}, {threads}-thread sum",
        order={**contender.order, "trainer": "sum", "trainer_threads": threads},
    )
