"""Run measures; tables for the terminal and for Markdown."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.contender import ContenderFailed
from benchmarks.outcome import Outcome, Row


def measured(
    measures: Mapping[str, Callable[[Any], Outcome]],
    setting: Any,
    names: Iterable[str],
    console: Console,
) -> tuple[dict[str, Outcome], list[float]]:
    """Run measures by their names, one after the other; one that fails is said and left out.

    Returns:
        What they gave, and the machine's load average before each and at the end, which includes
        the run itself.
    """
    outcomes: dict[str, Outcome] = {}
    load = []
    for name in names:
        load.append(round(os.getloadavg()[0], 1))
        try:
            with console.status(f"measuring {name}"):
                outcomes[name] = measures[name](setting)
        except ContenderFailed as failure:
            console.print(f"{name} failed: {failure}", style="red", markup=False)
        else:
            show(console, outcomes[name])
    load.append(round(os.getloadavg()[0], 1))
    return outcomes, load


def show(console: Console, outcome: Outcome) -> None:
    """One measure: what every contender gave, best first."""
    race = outcome.race
    table = Table(title=outcome.title, title_justify="left", title_style="bold")
    table.add_column("contender")
    table.add_column(race.unit, justify="right")
    table.add_column("min to max", justify="right", style="dim")
    best_first = sorted(race.values, key=lambda name: -statistics.median(race.values[name] or [0]))
    for name in best_first:
        values = race.values[name]
        if values:
            style = "bold green" if race.family[name] == "rayloader" else ""
            spread = f"{figure(min(values))} to {figure(max(values))}"
            table.add_row(name, figure(statistics.median(values)), spread, style=style)
    console.print(table)
    for name, reason in outcome.absent.items():
        console.print(f"  not run: {name}: {reason}", style="yellow", markup=False)
    for note in outcome.notes:
        console.print(f"  {note}", style="dim", markup=False)
    console.print()


def show_targets(console: Console, rows: Sequence[Row]) -> None:
    """All measures against their targets."""
    table = Table(title="Measured against its target", title_justify="left", title_style="bold")
    table.add_column("measure")
    table.add_column("against")
    table.add_column("median", justify="right")
    table.add_column("min to max", justify="right", style="dim")
    table.add_column("target", justify="right")
    table.add_column("met?")
    for row in rows:
        table.add_row(
            row.measure,
            row.against,
            f"{figure(row.median)} {row.unit}",
            f"{figure(min(row.values))} to {figure(max(row.values))}",
            f"{'≥' if row.at_least else '≤'} {row.target:g} {row.unit}",
            "[green]yes[/]" if row.met else "[red]no[/]",
        )
    console.print(table)


def markdown(record: dict[str, Any]) -> str:
    """What a run gave against its targets, as Markdown: where and when, and a table."""
    facts, load = record["environment"], record["load"]
    known = [
        f"{name} {facts[name]}" for name in ("ray", "torch", "s3dlio", "obstore") if name in facts
    ]
    rows = rows_of(record)
    all_met = all(row["met"] for row in rows)
    lines = [
        f"From one run of `{facts['command']}` on {facts['date']} ({facts['cpu']}, "
        f"{facts['memory']}, Linux {facts['kernel']}; Python {facts['python']}, "
        f"{', '.join(known)}; "
        f"{record['rounds']} rounds, {record['seconds']} s; the machine's load average while it "
        f"ran, itself included: {min(load):.0f} to {max(load):.0f}). "
        + ("Every target is met." if all_met else "Not every target is met; the table says which."),
        "",
        markdown_table(rows),
    ]
    return "\n".join(lines)


def rows_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    """What a run gave against its targets: each row as ``Row.asdict`` has it."""
    if "rows" in record:
        return list(record["rows"])
    return [row for measure in record["measures"].values() for row in measure["rows"]]


def markdown_table(rows: Iterable[dict[str, Any]]) -> str:
    """Rows against their targets, as a table in Markdown."""
    head = (
        "| measure | against | median | min to max | target | met |",
        "|---|---|---|---|---|---|",
    )
    return "\n".join([*head, *map(_markdown_row, rows)])


def _markdown_row(row: dict[str, Any]) -> str:
    unit = row["unit"].replace("x", "\N{MULTIPLICATION SIGN}")
    median, least, most, target = (
        f"{text} {unit}"
        for text in (
            figure(row["median"]),
            figure(min(row["values"])),
            figure(max(row["values"])),
            f"{row['target']:g}",
        )
    )
    bound, met = "≥" if row["at_least"] else "≤", "yes" if row["met"] else "no"
    cells = (row["measure"], row["against"], median, f"{least} to {most}", f"{bound} {target}", met)
    return f"| {' | '.join(cells)} |"


def figure(value: float) -> str:
    """A number with three significant digits."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
