"""Pictures of a sweep: throughput and latency against ranks and concurrency.

matplotlib is imported inside functions: only pictures need it.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import pyarrow as pa

from rayloader.errors import UsageError, printable
from rayloader.experiment.sweep import Point, about, doubt, points, verdict

GB, MB = 1e9, 1e6
_STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.7,
    "axes.edgecolor": "#888888",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "legend.fontsize": 9,
    "svg.fonttype": "path",
    "figure.facecolor": "white",
}
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Told apart by the colour-blind too (Okabe and Ito)."""
_MARKS = "osD^vPX"
_TITLE_WIDTH, _FOOT_WIDTH = 90, 140
"""Lines above and below the panels that fit in the picture [characters]."""
_DODGE = 0.012
"""Between points of two lines at the same place, of the axis [0..1]: whiskers stay apart."""
Draw: TypeAlias = Callable[[Any, Sequence[Point], Sequence[Point]], None]


def plot(
    table: pa.Table, baseline: pa.Table | None = None, *, baseline_name: str | None = None
) -> Any:
    """Draw a sweep: throughput and latency against ranks and concurrency.

    Points are medians of the measured epochs, whiskers the slowest and the fastest. The thin line
    is linear scaling from the fewest ranks. The limit is named where scaling stops.

    Args:
        table: from :meth:`Fleet.sweep <rayloader.Fleet.sweep>`, or the same as ``results.parquet``.
        baseline: another one, drawn dashed.
        baseline_name: what the picture calls it, its directory; not given: what was swept.

    Returns:
        A ``matplotlib.figure.Figure``; ``.savefig("sweep.png")``.

    Raises:
        UsageError: matplotlib is not installed.
        ReceiptError: the table has no measured epoch, or the baseline is of no sweep.
    """
    matplotlib = require_matplotlib()
    found, before = points(table), points(baseline) if baseline is not None else []
    with matplotlib.rc_context(_STYLE):
        figure = _figure(matplotlib, 11, 7.5)
        for axes, draw in zip(figure.subplots(2, 2).flat, PANELS.values(), strict=True):
            draw(axes, found, before)
        title = textwrap.fill(headline(found), _TITLE_WIDTH)
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        if baseline is not None:
            text = textwrap.fill(about_baseline(baseline, baseline_name), _FOOT_WIDTH)
            figure.supxlabel(text, x=0.01, ha="left", fontsize=9, parse_math=False)
    return figure


def headline(found: Sequence[Point]) -> str:
    """Where scaling stops, and why, in a line; or why that cannot be told."""
    seen = verdict(found)
    unit, divisor = unit_of(found)
    rate = f"{seen.at.rate / divisor:.3g} {unit}"
    if why := doubt(found):
        return f"{why[:1].upper()}{why[1:]}. Seen: {rate} at {seen.at.name} per rank"
    if len({point.ranks for point in found}) == 1:
        return f"{rate} at {seen.at.concurrency} in flight per rank; limit: {seen.at.limit}"
    if seen.stops_at is None:
        return (
            f"Still scaling at {seen.at.ranks} ranks: {rate}, {seen.efficiency:.0%} of linear; "
            f"limit: {seen.at.limit}"
        )
    count = f"{seen.stops_at} rank" + "s" * (seen.stops_at > 1)
    return f"Scaling stops at {count}: {rate}; limit: {seen.at.limit}"


def about_baseline(baseline: pa.Table, name: str | None) -> str:
    """What the dashed lines are: which sweep, and of which day.

    Raises:
        ReceiptError: the table is of no sweep.
    """
    one = about(baseline)
    measured = str(one["sessions"][-1]["time"])[:16].replace("T", " ")
    what = name if name is not None else one["sweep"]["source"]
    return f"Dashed: the baseline, {printable(what)}, measured {measured} UTC"


def unit_of(found: Sequence[Point]) -> tuple[str, float]:
    """What rates are shown in, and how many bytes per second that is."""
    return ("GB/s", GB) if max(point.rate for point in found) >= 0.2 * GB else ("MB/s", MB)


def size_of(size: float) -> str:
    """A file's size, in words."""
    for divisor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= divisor:
            return f"{size / divisor:.3g} {unit}"
    return f"{size:.0f} bytes"


def svg(name: str, found: Sequence[Point], before: Sequence[Point] = (), salt: str = "") -> str:
    """One of :data:`PANELS` as an SVG element, the same for the same points.

    Args:
        name: which.
        found: what to draw.
        before: the baseline's points.
        salt: of ids in the element, which must differ within a page.

    Raises:
        UsageError: matplotlib is not installed.
    """
    return _svg(salt + name, lambda axes: PANELS[name](axes, found, before))


def svg_of_sizes(each: Sequence[tuple[float, Sequence[Point]]]) -> str:
    """The best point of each size of files, against the size, as an SVG element."""

    def draw(axes: Any) -> None:
        best = [(size, verdict(found).best) for size, found in each]
        unit, divisor = unit_of([point for _, point in best])
        sizes = [size for size, _ in best]
        axes.plot(sizes, [point.rate / divisor for _, point in best], "o-", color=_COLOURS[0])
        for size, point in best:
            axes.annotate(
                point.limit, (size, point.rate / divisor), (0, 7), textcoords="offset points",
                ha="center", fontsize=8, color="#444444",
            )  # fmt: skip
        axes.set_xscale("log")
        axes.margins(0.15)
        axes.set_ylim(bottom=0)
        axes.set_xticks(sizes, [size_of(size) for size in sizes])
        axes.minorticks_off()
        axes.set_title("Best throughput against the size of files")
        axes.set_ylabel(unit)

    return _svg("sizes", draw)


def _svg(salt: str, draw: Callable[[Any], None]) -> str:
    matplotlib = require_matplotlib()
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": salt}):
        figure = _figure(matplotlib, 5.4, 3.7)
        draw(figure.subplots())
        page = io.StringIO()
        figure.savefig(page, format="svg", metadata={"Date": None})
    text = page.getvalue()
    return text[text.index("<svg") :]


def require_matplotlib() -> Any:
    """Import it.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise UsageError(
            "matplotlib is not installed, which draws pictures: pip install matplotlib"
        ) from None
    return matplotlib


def _figure(matplotlib: Any, width: float, height: float) -> Any:
    """A figure that no global state knows, and that notebooks show."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure: Any = Figure((width, height), layout="constrained")
    FigureCanvasAgg(figure)

    def png() -> bytes:
        page = io.BytesIO()
        figure.savefig(page, format="png", dpi=110)
        return page.getvalue()

    figure._repr_png_ = png
    return figure


def _rate_by_ranks(axes: Any, found: Sequence[Point], before: Sequence[Point]) -> None:
    unit, divisor = unit_of(found)
    _rate_lines(axes, found, before, "ranks", "concurrency")
    ranks = sorted({point.ranks for point in found})
    if len(ranks) > 1:
        first = max(point.rate for point in found if point.ranks == ranks[0])
        line = [first / ranks[0] * many / divisor for many in ranks]
        axes.plot(ranks, line, color="#777777", linewidth=0.8, zorder=1, label="linear")
        # The line may leave the panel, what was measured must not.
        top = max(*(it.high for it in found), *(it.rate for it in before)) / divisor
        height = 1.08 * max(top, min(max(line), 1.6 * top))
        axes.set_ylim(0, height)
        if not doubt(found):
            _name_limit(axes, found, divisor, height)
    _finish(
        axes, "Throughput against ranks", "ranks", unit, _values([*found, *before], "ranks"),
        "in flight per rank",
    )  # fmt: skip


def _name_limit(axes: Any, found: Sequence[Point], divisor: float, height: float) -> None:
    """Write what limits to where scaling stops, inside the panel."""
    at, last = verdict(found).at, max(point.ranks for point in found)
    low = at.rate / divisor < 0.25 * height
    axes.annotate(
        at.limit, (at.ranks, at.rate / divisor), (0 if at.ranks == last else 8, 20 if low else -24),
        textcoords="offset points", ha="right" if at.ranks == last else "left", fontsize=9,
        fontweight="bold", color="#444444", arrowprops={"arrowstyle": "-", "color": "#aaaaaa"},
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.7},
    )  # fmt: skip


def _rate_by_concurrency(axes: Any, found: Sequence[Point], before: Sequence[Point]) -> None:
    _rate_lines(axes, found, before, "concurrency", "ranks")
    title, values = "Throughput against concurrency", _values([*found, *before], "concurrency")
    _by_concurrency(axes, title, unit_of(found)[0], values)


def _latency_by_ranks(axes: Any, found: Sequence[Point], before: Sequence[Point]) -> None:
    keys = _values([*found, *before], "concurrency")
    _lines(axes, found, "ranks", "concurrency", _latencies, keys)
    axes.set_yscale("log")
    ranks = _values(found, "ranks")
    _finish(axes, "A read's latency, median to 99 %", "ranks", "ms", ranks, "in flight per rank")


def _latency_by_concurrency(axes: Any, found: Sequence[Point], before: Sequence[Point]) -> None:
    keys = _values([*found, *before], "ranks")
    _lines(axes, found, "concurrency", "ranks", _latencies, keys)
    axes.set_yscale("log")
    values = _values(found, "concurrency")
    _by_concurrency(axes, "A read's latency, median to 99 %", "ms", values)


def _values(found: Sequence[Point], name: str) -> list[int]:
    """What points have under a name, each once, in order."""
    return sorted({getattr(point, name) for point in found})


PANELS: dict[str, Draw] = {
    "rate by ranks": _rate_by_ranks,
    "rate by concurrency": _rate_by_concurrency,
    "latency by ranks": _latency_by_ranks,
    "latency by concurrency": _latency_by_concurrency,
}
"""What is drawn, by name, in this order."""


def _latencies(point: Point) -> tuple[float, float, float]:
    median = max(point.latency, 1e-7) * 1e3
    return median, median, max(point.latency_p99 * 1e3, median)


def _rate_lines(
    axes: Any, found: Sequence[Point], before: Sequence[Point], along: str, each: str
) -> None:
    divisor = unit_of(found)[1]

    def rates(point: Point) -> tuple[float, float, float]:
        return point.rate / divisor, point.low / divisor, point.high / divisor

    keys = _values([*found, *before], each)
    _lines(axes, found, along, each, rates, keys)
    _lines(axes, before, along, each, rates, keys, dashed=True)
    if before:
        axes.plot([], [], "--", color="#777777", linewidth=1, label="baseline")
    axes.set_ylim(bottom=0)


def _lines(
    axes: Any,
    found: Sequence[Point],
    along: str,
    each: str,
    values: Callable[[Point], tuple[float, float, float]],
    keys: Sequence[int],
    dashed: bool = False,
) -> None:
    """A line with whiskers for each value of ``each``, which decides its colour by ``keys``."""
    for number, key in enumerate(keys):
        line = sorted(
            (it for it in found if getattr(it, each) == key), key=lambda it: getattr(it, along)
        )
        if not line:
            continue
        middle, low, high = zip(*map(values, line), strict=True)
        whiskers = [
            [at - lowest for at, lowest in zip(middle, low, strict=True)],
            [highest - at for at, highest in zip(middle, high, strict=True)],
        ]
        axes.errorbar(
            _dodged(_values(found, along), [getattr(point, along) for point in line], along,
                    number - (len(keys) - 1) / 2),
            middle,
            None if dashed else whiskers,
            color=_COLOURS[number % len(_COLOURS)],
            marker=None if dashed else _MARKS[number % len(_MARKS)],
            linestyle="--" if dashed else "-",
            linewidth=1 if dashed else 1.6,
            markersize=5,
            capsize=2.5,
            elinewidth=0.9,
            alpha=0.6 if dashed else 1,
            label=None if dashed else str(key),
        )  # fmt: skip


def _dodged(
    axis: Sequence[int], places: Sequence[int], along: str, steps: float
) -> Sequence[float]:
    """Places moved aside by so many steps; concurrency has a logarithmic axis."""
    if along == "concurrency":
        return [at * (axis[-1] / axis[0]) ** (steps * _DODGE) for at in places]
    return [at + (axis[-1] - axis[0]) * steps * _DODGE for at in places]


def _by_concurrency(axes: Any, title: str, unit: str, values: Sequence[int]) -> None:
    if len(values) > 1:
        axes.set_xscale("log", base=2)
    _finish(axes, title, "reads in flight per rank, at most", unit, values, "ranks")


def _finish(axes: Any, title: str, along: str, unit: str, ticks: Sequence[int], lines: str) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, NullLocator, StrMethodFormatter

    axes.set_title(title)
    axes.set_xlabel(along)
    axes.set_ylabel(unit)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    if axes.get_yscale() == "log":
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    # Beside the panel: inside it would cover what it explains.
    axes.legend(title=lines, loc="upper left", bbox_to_anchor=(1, 1))
