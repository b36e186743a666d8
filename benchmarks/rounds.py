"""Rounds: every contender once per round, in random order; ratios within a round.

Method: absolute rates drift by a factor of two on a shared machine, from minute to minute. A round
is short, so what disturbs one contender disturbs its neighbours; a ratio is computed within each
round, and its median over the rounds is what is compared with a target. Where "the best of" some
contenders is asked for, it is the one with the best median over all rounds, in every round.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import statistics
from collections.abc import Callable, Sequence
from typing import Protocol

from benchmarks.contender import Epoch, Stage


class Pace(Protocol):
    """How long a race is; a part of every setting.

    Attributes:
        rounds: turns of each contender.
        seconds: about how long a turn is [s].
        seed: of the order within rounds.
    """

    @property
    def rounds(self) -> int:
        """See above."""
        ...

    @property
    def seconds(self) -> float:
        """See above."""
        ...

    @property
    def seed(self) -> int:
        """See above."""
        ...


def gigabytes_per_second(epochs: Sequence[Epoch]) -> float:
    """Median rate of a turn's epochs [GB/s]."""
    return statistics.median(epoch.bytes / epoch.seconds / 1e9 for epoch in epochs)


def thousand_files_per_second(epochs: Sequence[Epoch]) -> float:
    """Median rate of a turn's epochs [1000 files/s]."""
    return statistics.median(epoch.files / epoch.seconds / 1e3 for epoch in epochs)


def gap_milliseconds(epochs: Sequence[Epoch]) -> float:
    """Median time from the last batch of an epoch to the first of the next [ms]."""
    return statistics.median(
        (after.first - before.last) * 1e3 for before, after in itertools.pairwise(epochs)
    )


@dataclasses.dataclass(frozen=True)
class Race:
    """What a number of rounds gave.

    Attributes:
        unit: of the values.
        values: contender's name → its value in each round; empty for one that did not run.
        family: contender's name → family.
    """

    unit: str
    values: dict[str, list[float]]
    family: dict[str, str]

    def best(self, *families: str) -> str | None:
        """The contender of these families with the highest median; ``None``: none of them ran."""
        known = [name for name, values in self.values.items() if self.family[name] in families]
        return max(known, key=lambda name: statistics.median(self.values[name]), default=None)

    def ratios(self, name: str, other: str) -> list[float]:
        """``name`` in terms of ``other``, round by round."""
        return [a / b for a, b in zip(self.values[name], self.values[other], strict=True)]


def race(
    stage: Stage,
    setting: Pace,
    *,
    unit: str = "GB/s",
    value: Callable[[Sequence[Epoch]], float] = gigabytes_per_second,
    epochs: int | None = None,
    before: Callable[[], object] | None = None,
    keep: dict[str, list[Sequence[Epoch]]] | None = None,
) -> Race:
    """Let the contenders on the stage take turns.

    Args:
        stage: the running contenders.
        setting: how many rounds, how long a turn is, and the seed of the order within the rounds.
        unit: of ``value``.
        value: of the epochs of one turn.
        epochs: in each turn; ``None``: as many as ``setting.seconds`` allow, at least one.
        before: run before every turn, outside the clock.
        keep: contender's name → every turn of it, filled here for who needs more than ``value``.
    """
    order = random.Random(setting.seed)
    values: dict[str, list[float]] = {contender.name: [] for contender in stage.contenders}
    for _ in range(setting.rounds):
        for contender in order.sample(stage.contenders, len(stage.contenders)):
            if before is not None:
                before()
            turn = stage.turn(contender, epochs, setting.seconds)
            values[contender.name].append(value(turn))
            if keep is not None:
                keep.setdefault(contender.name, []).append(turn)
    return Race(unit, values, {one.name: one.family for one in stage.contenders})
