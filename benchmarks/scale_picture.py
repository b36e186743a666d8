"""The picture of how rayloader scales: a panel per question, lines over ranks or entries."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmarks.picture import FAINT, OURS, STYLE, YARDSTICK

Measures = dict[str, list[dict[str, Any]]]
SHADES = ("#9fd3c7", "#62b6a6", "#2f9583", OURS, "#0a4a41")


def draw(record: dict[str, Any], path: Path) -> None:
    """Draw the measures that a record holds."""
    panels = [(name, paint) for name, paint in PANELS if name in record["measures"]]
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    with plt.rc_context(STYLE):
        canvas = plt.figure(figsize=(6.1 * columns, 4.4 * rows + 0.9), layout="constrained")
        grid = canvas.subplots(rows, columns, squeeze=False)
        for axes, (_, paint) in zip(grid.flat, panels, strict=False):
            paint(axes, record["measures"])
            axes.grid(color="#e8ebf0", zorder=0)
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        facts = record["environment"]
        canvas.suptitle(
            "rayloader by the number of ranks and of entries",
            x=0.01, ha="left", fontsize=14, fontweight="bold",
        )  # fmt: skip
        canvas.supxlabel(
            f"{facts['cpu']}, {facts['memory']}, Linux {facts['kernel']}, {facts['date']}; load "
            f"average meanwhile {min(record['load']):.0f} to {max(record['load']):.0f}",
            x=0.01, ha="left", fontsize=8.5, color=FAINT,
        )  # fmt: skip
        canvas.savefig(path, dpi=140)
        plt.close(canvas)


def _by_entries(name: str, title: str, unit: str) -> Callable[[Axes, Measures], None]:
    """A figure of the plan over entries, a line for each number of ranks."""

    def paint(axes: Axes, measures: Measures) -> None:
        costs = measures["plan"]
        for shade, ranks in zip(SHADES, sorted({one["ranks"] for one in costs}), strict=False):
            own = [one for one in costs if one["ranks"] == ranks]
            label = f"{ranks:,} rank{'s' if ranks > 1 else ''}"
            axes.plot(
                [one["entries"] for one in own], [one[name] for one in own],
                marker="o", markersize=4, color=shade, label=label,
            )  # fmt: skip
        axes.set_xscale("log")
        axes.set_ylim(0, 1.4 * max(one[name] for one in costs))
        _named(axes, title, "entries in the catalog", unit)
        axes.legend(frameon=False, fontsize=8, ncols=2)

    return paint


def _driver(axes: Axes, measures: Measures) -> None:
    costs = measures["plan"]
    for shade, entries in zip(SHADES, sorted({one["entries"] for one in costs}), strict=False):
        own = [one for one in costs if one["entries"] == entries]
        axes.plot(
            [one["ranks"] for one in own], [one["driver_us"] * one["ranks"] / 1e3 for one in own],
            marker="o", markersize=4, color=shade, label=f"{entries:,} entries",
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    _named(axes, "Driver: an epoch given to all ranks", "ranks", "ms")
    axes.legend(frameon=False, fontsize=8)


def _messages(axes: Axes, measures: Measures) -> None:
    counts = measures["messages"]
    labels = [
        f"{one['ranks']:,}, {one['entries']:,}" + (", driver" if one["who"] == "driver" else "")
        for one in counts
    ]
    places = range(len(counts))
    axes.barh(places, [one["control"] for one in counts], color=OURS, height=0.6, zorder=2)
    for place, one in zip(places, counts, strict=True):
        axes.text(one["control"] + 0.05, place, f"{one['control']:g}", va="center")
    axes.set_yticks(places, labels)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.3 * max(one["control"] for one in counts))
    _named(axes, "Control messages per rank and epoch", "messages", "ranks, entries")


def _fleet(axes: Axes, measures: Measures) -> None:
    rates = measures["fleet"]
    ranks = [one["ranks"] for one in rates]
    medians = [sorted(one["files_per_second"])[len(one["files_per_second"]) // 2] for one in rates]
    ideal = [many * medians[0] / ranks[0] for many in ranks]
    axes.plot(ranks, ideal, color=YARDSTICK, linestyle=(0, (4, 3)), linewidth=1.1, label="linear")
    low = [
        median - min(one["files_per_second"]) for median, one in zip(medians, rates, strict=True)
    ]
    high = [
        max(one["files_per_second"]) - median for median, one in zip(medians, rates, strict=True)
    ]
    axes.errorbar(
        ranks, medians, yerr=[low, high], color=OURS, marker="o", capsize=2.5, label="a Fleet"
    )
    for many, median, one in zip(ranks, medians, rates, strict=True):
        axes.annotate(
            f"CPUs {one['busy']:.0%}", (many, median), xytext=(4, -12), textcoords="offset points",
            fontsize=7.5, color=FAINT,
        )  # fmt: skip
    axes.set_ylim(0)
    _named(axes, "A Fleet, answers after 5 ms, 4 in flight per rank", "ranks", "objects/s")
    axes.legend(frameon=False, fontsize=8)


def _named(axes: Axes, title: str, across: str, up: str) -> None:
    axes.set_title(title, loc="left", fontweight="bold", fontsize=11)
    axes.set_xlabel(across)
    axes.set_ylabel(up)


PANELS: tuple[tuple[str, Callable[[Axes, Measures], None]], ...] = (
    ("plan", _by_entries("start_ms", "Rank: a request → its first batch", "ms")),
    ("plan", _by_entries("memory_mb", "Rank: memory of its own", "MB")),
    ("plan", _by_entries("open_ms", "Rank: catalog mapped, digest known; once in a run", "ms")),
    ("plan", _driver),
    ("messages", _messages),
    ("fleet", _fleet),
)
"""Measure → what paints a panel of it."""
