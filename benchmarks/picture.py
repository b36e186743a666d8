"""The picture of a run: one panel per measure, bars with their spread, a yardstick as a line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.report import figure

OURS, YARDSTICK, PEER, FAINT, INK = "#0f7b6c", "#3b4252", "#b4bcc8", "#6b7280", "#1f2430"
SMALLER_IS_BETTER = ("ms", "CPU s/GB")
"""Units of which the least is drawn on top."""
COLUMNS, BARS = 3, 9
"""Panels in a row, and bars in a panel that has room for more than one of each family."""
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": "#d5dae1",
    "axes.labelcolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": FAINT,
    "ytick.color": INK,
}
PANELS = (
    ("one-rank", "One rank, 322 KB files"),
    ("summed", "… and the trainer sums every byte"),
    ("small-files", "One rank, 10 KB files"),
    ("concurrency", "One rank, reads in flight"),
    ("throughput", "Two ranks, and cold files"),
    ("turnover", "Last batch of an epoch → first of the next"),
)
"""Measure → title. ``throughput`` puts two measures into one panel, where no line fits both."""


class Yardstick(NamedTuple):
    """Whose best figure is a line through all bars of a panel.

    Attributes:
        family: of contenders.
        words: what the line is, for the caption.
    """

    family: str
    words: str


C_READER = Yardstick("c", "the C reader's best")

Contenders = dict[str, dict[str, Any]]


def draw(record: dict[str, Any], path: Path) -> None:
    """Draw the measures that a record holds; nothing when it holds none that is drawn."""
    panels = found_panels(record, PANELS)
    title = (
        "rayloader beside its peers: files delivered as tensors to a training loop, page cache hot"
        " unless said"
    )
    draw_panels(panels, title, record, path)


def found_panels(
    record: dict[str, Any], wanted: Sequence[tuple[str, str]]
) -> list[tuple[str, Contenders, str]]:
    """Those of the wanted panels (measure, title) that a record has figures for."""
    return [
        (title, *found)
        for name, title in wanted
        if (found := _contenders(record["measures"], name))
    ]


def draw_panels(
    panels: Sequence[tuple[str, Contenders, str]],
    title: str,
    record: dict[str, Any],
    path: Path,
    yardstick: Yardstick = C_READER,
) -> None:
    """Draw some panels: (title, contenders, unit) of each; nothing when there are none."""
    if not panels:
        return
    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    with plt.rc_context(STYLE):
        canvas = plt.figure(figsize=(6.1 * columns, 4.6 * rows + 0.9), layout="constrained")
        grid = canvas.subplots(rows, columns, squeeze=False)
        for axes, panel in zip(grid.flat, panels, strict=False):
            _bars(axes, *panel, yardstick.family)
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        _captions(canvas, title, record, yardstick)
        canvas.savefig(path, dpi=140)
        plt.close(canvas)


def _contenders(measures: dict[str, Any], name: str) -> tuple[Contenders, str] | None:
    """Who is drawn in one panel, and the unit."""
    if name == "throughput":
        chosen = _chosen(measures.get("two-ranks"), fewest=BARS // 2)
        cold = _chosen(measures.get("cold"), fewest=BARS // 2)
        chosen |= {f"{who}, cold": seen for who, seen in cold.items()}
        return (chosen, "GB/s") if chosen else None
    measure = measures.get(name)
    if measure is None or not measure["contenders"]:
        return None
    chosen = _chosen(measure, fewest=BARS)
    if name == "one-rank":
        beside = _chosen(measures.get("ray-data"), fewest=0)
        chosen |= {who: seen for who, seen in beside.items() if seen["family"] == "Ray Data"}
    return chosen, measure["unit"]


def _chosen(measure: dict[str, Any] | None, fewest: int) -> Contenders:
    """The best contender of each family, and further ones, best first, up to ``fewest``."""
    contenders: Contenders = (measure or {"contenders": {}})["contenders"]
    ordered = sorted(contenders, key=lambda name: -contenders[name]["median"])
    best = {contenders[name]["family"]: name for name in reversed(ordered)}
    names = set(best.values())
    names.update([name for name in ordered if name not in names][: max(0, fewest - len(names))])
    return {name: seen for name, seen in contenders.items() if name in names}


def _bars(axes: Axes, title: str, contenders: Contenders, unit: str, yardstick: str) -> None:
    """Horizontal bars, best on top; whiskers from the slowest to the fastest round."""
    ordered = sorted(
        contenders.items(),
        key=lambda item: item[1]["median"],
        reverse=unit not in SMALLER_IS_BETTER,
    )
    if all(seen["family"].startswith("rayloader") for _, seen in ordered):
        ordered = list(contenders.items())
    places = range(len(ordered))
    medians = [seen["median"] for _, seen in ordered]
    below = [seen["median"] - seen["min"] for _, seen in ordered]
    above = [seen["max"] - seen["median"] for _, seen in ordered]
    colours = [_colour(seen["family"], yardstick) for _, seen in ordered]
    axes.barh(places, medians, height=0.7 * len(ordered) / (BARS + 1), color=colours, zorder=2)
    axes.errorbar(
        medians,
        places,
        xerr=[below, above],
        fmt="none",
        ecolor=INK,
        elinewidth=0.9,
        capsize=2.5,
        alpha=0.75,
        zorder=3,
    )
    most = max(seen["max"] for _, seen in ordered)
    for place, (_, seen) in zip(places, ordered, strict=True):
        axes.text(
            seen["max"] + most * 0.02,
            place,
            figure(seen["median"]),
            va="center",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.2},
            fontweight="bold" if seen["family"] == "rayloader" else "normal",
        )
    axes.set_yticks(places, [name for name, _ in ordered])
    for label, (_, seen) in zip(axes.get_yticklabels(), ordered, strict=True):
        label.set_fontweight("bold" if seen["family"] == "rayloader" else "normal")
    _yardstick(axes, contenders, yardstick)
    axes.invert_yaxis()
    axes.set_xlim(0, most * 1.16)
    axes.set_xlabel(unit)
    axes.set_title(title, loc="left", fontweight="bold", fontsize=11)
    axes.grid(axis="x", color="#e8ebf0", zorder=0)
    axes.tick_params(length=0)


def _yardstick(axes: Axes, contenders: Contenders, family: str) -> None:
    """The yardstick's best figure as a line through all bars."""
    known = [seen["median"] for seen in contenders.values() if seen["family"] == family]
    best = max(known, default=0)
    if best and not any(name.endswith("cold") for name in contenders):
        axes.axvline(best, color=YARDSTICK, linestyle=(0, (4, 3)), linewidth=1.1, zorder=1.5)


def _colour(family: str, yardstick: str) -> str:
    if family.startswith("rayloader"):
        return OURS
    return YARDSTICK if family.split(" ")[0] == yardstick else PEER


def _captions(canvas: Figure, title: str, record: dict[str, Any], yardstick: Yardstick) -> None:
    facts = record["environment"]
    canvas.suptitle(
        title,
        x=0.01,
        ha="left",
        fontsize=14,
        fontweight="bold",
    )
    canvas.supxlabel(
        f"Bars: median of {record['rounds']} rounds (of many contenders the best of each kind); "
        f"whiskers: slowest to fastest round; dashed line: {yardstick.words}.   "
        f"{facts['cpu']}, {facts['memory']}, Linux {facts['kernel']}, {facts['file_system']}, "
        f"{facts['date']}",
        x=0.01,
        ha="left",
        fontsize=8.5,
        color=FAINT,
    )
