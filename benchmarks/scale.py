"""How rayloader scales with ranks and entries: tables, a JSON file and a picture.

Command: ``python -m benchmarks.scale`` (``make bench-scale``), from the repository's root.
``--quick`` takes a minute or two; ``--only NAME`` runs one measure. Method: README.md here.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import command, environment, report, scale_picture
from benchmarks.measures import scale_fleet, scale_messages, scale_plan
from benchmarks.outcome import Row

MEASURES: dict[str, Callable[[Path, bool], Sequence[Any]]] = {
    "plan": scale_plan.run,
    "messages": scale_messages.run,
    "fleet": scale_fleet.run,
}
"""Name, as ``--only`` takes it → what measures it."""


def main() -> None:
    """Measure, and report."""
    words = _arguments()
    console = Console()
    data = command.data_of(words)
    began, load = time.monotonic(), [_load()]
    found: dict[str, list[dict[str, Any]]] = {}
    for name in words.only or MEASURES:
        with console.status(f"measuring {name}"):
            found[name] = [dataclasses.asdict(one) for one in MEASURES[name](data, words.quick)]
        load.append(_load())
        console.print(_table(name, found[name]))
    rows = targets(found)
    report.show_targets(console, rows)
    record = {
        "environment": environment.describe(data, "scale"),
        "load": load,
        "rounds": scale_fleet.rounds(words.quick),
        "seconds": round(time.monotonic() - began),
        "measures": found,
        "rows": [row.asdict() for row in rows],
    }
    folder = command.folder_of(words, data)
    command.keep(folder, "scale", record, scale_picture.draw)
    console.print(f"{record['seconds']} s; results in {folder}")


def targets(found: dict[str, list[dict[str, Any]]]) -> list[Row]:
    """What must not grow, and what must."""
    rows: list[Row] = []
    if costs := found.get("plan"):
        rows += _plan_rows(costs)
    if counts := found.get("messages"):
        for who, what in (("rank", "a rank and its reader"), ("driver", "a Fleet's driver")):
            control = [one["control"] for one in counts if one["who"] == who]
            name = f"messages per rank and epoch, {what}, most"
            rows.append(Row(name, "least", [max(control) / min(control)], 1.0, at_least=False))
    if rates := found.get("fleet"):
        alone = rates[0]["files_per_second"]
        for one in rates[1:]:
            pairs = zip(one["files_per_second"], alone, strict=True)
            many = one["ranks"]
            rows.append(
                Row(f"objects/s at 5 ms, {many} ranks", "1 rank", [a / b for a, b in pairs],
                    0.85 * many)
            )  # fmt: skip
    return rows


def _plan_rows(costs: list[dict[str, Any]]) -> list[Row]:
    few, many = min(one["entries"] for one in costs), max(one["entries"] for one in costs)
    most = max(one["ranks"] for one in costs)

    def of(ranks: int, entries: int, name: str) -> float:
        (cost,) = [one for one in costs if (one["ranks"], one["entries"]) == (ranks, entries)]
        return float(cost[name])

    start, large = of(most, many, "start_ms"), f"{most:,} ranks, {many:,} entries"
    per_rank = of(most, many, "driver_us") / of(most, few, "driver_us")
    return [
        Row("start of a rank's epoch, " + large, "", [start], 20, "ms", at_least=False),
        Row("start of a rank's epoch, " + large, "1 rank", [start / of(1, many, "start_ms")], 1.5,
            at_least=False),
        Row("memory of a rank, " + large, "", [of(most, many, "memory_mb")], 20, "MB",
            at_least=False),
        Row("driver per rank and epoch, " + large, f"{few:,} entries", [per_rank], 1.5,
            at_least=False),
    ]  # fmt: skip


def _table(name: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=name, title_justify="left", title_style="bold")
    for column in rows[0]:
        table.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    return table


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return report.figure(value)
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    if isinstance(value, dict):
        return ", ".join(f"{name} {_cell(it)}" for name, it in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)


def _load() -> float:
    return round(os.getloadavg()[0], 1)


def _arguments() -> argparse.Namespace:
    return command.parser(
        "scale", __doc__, "fewer ranks, entries and epochs", MEASURES
    ).parse_args()


if __name__ == "__main__":
    main()
