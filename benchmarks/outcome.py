"""What a measure hands over: values per contender, and ratios to be held against targets."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.rounds import Race


@dataclasses.dataclass(frozen=True)
class Row:
    """One measured ratio (or time, or size) and its target.

    Attributes:
        measure: what is measured.
        against: what it is compared with; empty where it stands for itself.
        values: one per round.
        target: what the median must reach.
        unit: ``x``, ``ms``, ``MB``.
        at_least: False where the target is an upper bound.
    """

    measure: str
    against: str
    values: Sequence[float]
    target: float
    unit: str = "x"
    at_least: bool = True

    @property
    def median(self) -> float:
        """The middle of the rounds."""
        return statistics.median(self.values)

    @property
    def met(self) -> bool:
        """Whether the median reaches the target."""
        return self.median >= self.target if self.at_least else self.median <= self.target

    def asdict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "measure": self.measure,
            "against": self.against,
            "values": list(self.values),
            "median": self.median,
            "target": self.target,
            "unit": self.unit,
            "at_least": self.at_least,
            "met": self.met,
        }


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one measure gave.

    Attributes:
        title: for people.
        race: the contenders' values, round by round.
        rows: what is held against targets.
        notes: what a reader must know to judge it.
        absent: contender → why it did not run.
    """

    title: str
    race: Race
    rows: Sequence[Row]
    notes: Sequence[str] = ()
    absent: dict[str, str] = dataclasses.field(default_factory=dict)

    def asdict(self) -> dict[str, Any]:
        """For JSON."""
        contenders = {
            name: {
                "family": self.race.family[name],
                "median": statistics.median(values),
                "min": min(values),
                "max": max(values),
                "values": values,
            }
            for name, values in self.race.values.items()
        }
        return {
            "title": self.title,
            "unit": self.race.unit,
            "contenders": contenders,
            "rows": [row.asdict() for row in self.rows],
            "notes": list(self.notes),
            "absent": self.absent,
        }


def compared(measure: str, race: Race, ours: str, targets: dict[str, float]) -> list[Row]:
    """Hold one contender against the best of each of some families.

    Args:
        measure: what is compared, in a word or two.
        race: what the rounds gave.
        ours: the contender's name.
        targets: family → the ratio to be reached.

    Returns:
        A row for each of the families that ran.
    """
    rows = []
    for family, target in targets.items():
        best = race.best(family)
        if best is not None and ours in race.values:
            rows.append(Row(measure, best, race.ratios(ours, best), target))
    return rows
