"""From the last batch of an epoch to the first of the next: what a new list of files costs.

Method: epochs follow one another in one process; the gap runs from the moment the trainer has dealt
with the last batch to the moment it has the first one of the next epoch, so that it includes the
end of the old workers, the new list and the first read. Page cache hot. A second part has a catalog
of 1,000,000 entries (a saved one that names the 20,000 small files fifty times over, read in full).

Command: ``python -m benchmarks.posix --only turnover``.

Peers: torch ``DataLoader`` that respawns 2 workers every epoch, by fork (Linux' default up to
Python 3.13; the quickest) and by spawn (what DLIO and programs with threads use); one whose workers
persist (and which therefore cannot take a new list) is shown beside.
"""

from __future__ import annotations

import dataclasses
import itertools

from benchmarks import lineup
from benchmarks.contender import Stage
from benchmarks.files import million
from benchmarks.lineup import Setting
from benchmarks.outcome import Outcome, Row
from benchmarks.rounds import gap_milliseconds, race

EPOCHS = 3
"""In a turn, so that it has two gaps."""
MILLION = "rayloader, 1 M entries"


def run(setting: Setting) -> Outcome:
    """Measure."""
    files = setting.large
    ours = lineup.rayloader(files)
    respawned = [lineup.torch_respawned(files, how) for how in ("fork", "spawn")]
    persistent = lineup.torch_workers(files, 2, "stack")
    named = dataclasses.replace(persistent, name="torch, 2 persistent workers")
    contenders = [ours, *respawned, named]
    few = dataclasses.replace(setting, rounds=min(setting.rounds, 1 if setting.quick else 5))
    with Stage(setting.processes, contenders, files, warm_epochs=1) as stage:
        result = race(stage, few, unit="ms", value=gap_milliseconds, epochs=EPOCHS)
    rows = []
    if ours.name in result.values:
        for peer in respawned:
            shorter = result.ratios(peer.name, ours.name)
            rows.append(Row("gap between epochs, shorter than", peer.name, shorter, 50.0))
    gaps = _gaps_of_million(setting)
    if gaps:
        rows.append(Row("gap between epochs, 1 M entries", "", gaps, 100.0, "ms", at_least=False))
        result.values[MILLION], result.family[MILLION] = gaps, "rayloader"
    return Outcome("End of an epoch → first batch of the next", result, rows, absent=stage.absent)


def _gaps_of_million(setting: Setting) -> list[float]:
    files = million(setting.data, setting.small)
    ours = dataclasses.replace(lineup.rayloader(files), name=MILLION, lasting=False)
    with Stage(setting.processes, [ours], files, verify=False, warm_epochs=0) as stage:
        if stage.absent:
            return []
        epochs = stage.turn(ours, 3 if setting.quick else 5)
    return [gap_milliseconds(pair) for pair in itertools.pairwise(epochs)]
