"""One self-contained page of a sweep: ``report.html``. A function of the table alone."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from rayloader.errors import ReceiptError, counted, printable
from rayloader.experiment import plot, sweep
from rayloader.experiment.grid import Grid
from rayloader.experiment.sweep import Point

PAGE = "report.html"
OTHERS = 0.2
"""What other programs may use of the CPUs before it is warned of [0..1]."""
_NAMED = 3
"""Points that a warning names [points]."""
_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; margin: 0 auto;
  max-width: 76rem; padding: 1.2rem; }
h1 { font-size: clamp(1.4rem, 4.5vw, 2.4rem); line-height: 1.2; margin: 0 0 .4rem; }
h2 { font-size: 1.3rem; margin: 2.5rem 0 .5rem; }
h3 { font-size: 1.1rem; margin: 1.5rem 0 .5rem; }
.why { font-size: 1.1rem; max-width: 60rem; margin: 0; }
.small { color: #555; font-size: .9rem; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 28rem), 1fr));
  gap: 1rem; margin-top: 1rem; }
figure { margin: 0; break-inside: avoid; }
svg { width: 100%; height: auto; display: block; }
.wide { overflow-x: auto; }
td, th { border-bottom: 1px solid #e4e4e4; vertical-align: top; }
.warning { background: #fff3d6; border-left: 4px solid #e69f00; padding: .5rem .8rem; }
@media print { body { padding: 0; font-size: 11px; } .figures { grid-template-columns: 1fr 1fr; }
  .wide { overflow: visible; } h2, h3 { break-after: avoid; } tr { break-inside: avoid; } }
"""


def page(
    table: pa.Table, baseline: pa.Table | None = None, baseline_name: str | None = None
) -> str:
    """The page of a sweep, which needs no other file and no network.

    Args:
        table: of the sweep.
        baseline: of another one, drawn dashed.
        baseline_name: what the page calls that, its directory; not given: what was swept.

    Raises:
        ReceiptError: there is no measured epoch.
        UsageError: matplotlib is not installed.
    """
    title = plot.headline(measured(table))
    parts = _parts(table, baseline, baseline_name)
    return _document(title, [f"<h1>{html.escape(title)}</h1>", *parts])


def page_of_sizes(tables: Sequence[pa.Table]) -> str:
    """The page of several sweeps that differ in the size of their files, by size.

    Raises:
        ReceiptError: one has no measured epoch.
        UsageError: matplotlib is not installed.
    """
    each = [(sweep.file_bytes(table), measured(table)) for table in tables]
    best = max((found for _, found in each), key=lambda found: sweep.verdict(found).best.rate)
    rate = sweep.verdict(best).best.rate
    unit, divisor = plot.unit_of(best)
    size = next(size for size, found in each if found is best)
    title = f"Fastest with files of {plot.size_of(size)}: {rate / divisor:.3g} {unit}"
    if why := next(filter(None, (sweep.doubt(found) for _, found in each)), ""):
        title += f"; but {why}"
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        f'<div class="figures"><figure>{plot.svg_of_sizes(each)}</figure></div>',
        f'<div class="wide">{_sizes(each).html()}</div>',
    ]
    for (size, found), table in zip(each, tables, strict=True):
        heading = f"Files of {plot.size_of(size)}: {plot.headline(found)}"
        parts += [f"<h2>{html.escape(heading)}</h2>", *_parts(table, salt=f"{size:.0f} ")]
    return _document(title, parts)


def _document(title: str, parts: Sequence[str]) -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _parts(
    table: pa.Table,
    baseline: pa.Table | None = None,
    baseline_name: str | None = None,
    salt: str = "",
) -> list[str]:
    """What a page says of one sweep, below its headline; ``salt`` keeps its figures' ids apart."""
    found = measured(table)
    before = measured(baseline) if baseline is not None else []
    about = sweep.about(table)
    figures = "".join(
        f"<figure>{plot.svg(name, found, before, salt)}</figure>" for name in _wanted(found)
    )
    return [
        f'<p class="why">{html.escape(_why(found))}</p>',
        f'<p class="small">{html.escape(_what(about))}</p>',
        *(f'<p class="warning">{html.escape(text)}</p>' for text in warnings(table, baseline)),
        f'<div class="figures">{figures}</div>',
        *_dashed(baseline, baseline_name),
        f'<h3>Every point</h3><div class="wide">{grid(found, before).html()}</div>',
        f'<h3>How it was measured</h3><div class="wide">{_environment(about).html()}</div>',
        f'<p class="small">{html.escape(_method(about))}</p>',
    ]


def _dashed(baseline: pa.Table | None, name: str | None) -> list[str]:
    """What the dashed lines are, where there are any."""
    if baseline is None:
        return []
    return [f'<p class="small">{html.escape(plot.about_baseline(baseline, name))}.</p>']


def _sizes(each: Sequence[tuple[float, list[Point]]]) -> Grid:
    """A row per size of files: its best point."""
    rows = []
    for size, found in each:
        seen, (unit, divisor) = sweep.verdict(found), plot.unit_of(found)
        stops = str(seen.stops_at) if seen.stops_at is not None else "-"
        rows.append(
            (plot.size_of(size), f"{seen.best.rate / divisor:.3g} {unit}",
             f"{seen.best.files_rate:,.0f}", str(seen.best.ranks), str(seen.best.concurrency),
             stops, seen.best.limit)
        )  # fmt: skip
    columns = ("size", "best", "files/s", "ranks", "in flight\nper rank", "scaling\nstops at",
               "<limit")  # fmt: skip
    return Grid("", columns, tuple(rows))


def measured(table: pa.Table) -> list[Point]:
    """The table's points.

    Raises:
        ReceiptError: there is none.
    """
    found = sweep.points(table)
    if not found:
        raise ReceiptError("no epoch has been measured yet")
    return found


def write(
    table: pa.Table,
    directory: str,
    baseline: pa.Table | None = None,
    baseline_name: str | None = None,
) -> list[str]:
    """Write the page and the pictures into a directory; their paths. See :func:`page`."""
    picture = os.path.join(directory, "sweep.png")
    plot.plot(table, baseline, baseline_name=baseline_name).savefig(picture, dpi=130)
    return [_written(page(table, baseline, baseline_name), directory), picture]


def write_sizes(tables: Sequence[pa.Table], directory: str) -> list[str]:
    """Write the page of several sizes into a directory; its path."""
    return [_written(page_of_sizes(tables), directory)]


def _written(text: str, directory: str) -> str:
    target = os.path.join(directory, PAGE)
    with open(target, "w", encoding="utf-8") as file:
        file.write(text)
    return target


def grid(found: Sequence[Point], before: Sequence[Point] = ()) -> Grid:
    """The points as a table, with a comparison where there is another sweep."""
    seen = sweep.verdict(found)
    unit, divisor = plot.unit_of(found)
    known = {(point.ranks, point.concurrency): point for point in before}
    rows = []
    for point in found:
        row = [
            str(point.ranks), str(point.concurrency), f"{point.rate / divisor:.2f}",
            f"{point.low / divisor:.2f} to {point.high / divisor:.2f}", f"{point.files_rate:,.0f}",
            f"{point.latency * 1e3:.2f}", f"{point.latency_p99 * 1e3:.2f}",
            f"{point.in_flight:.1f}", f"{point.cpu_share:.0%}", point.limit,
        ]  # fmt: skip
        if before:
            other = known.get((point.ranks, point.concurrency))
            row.insert(4, f"{point.rate / other.rate:.2f} x" if other and other.rate else "")
        rows.append(tuple(row))
    columns = ["ranks", "in flight\nper rank", f"{unit}\nmedian", "slowest\nto fastest", "files/s",
               "p50\nms", "p99\nms", "in flight\nmean, all", "CPU\nused", "<limit"]  # fmt: skip
    if before:
        columns.insert(4, "of the\nbaseline")
    return Grid(
        "", tuple(columns), tuple(rows),
        frozenset([found.index(seen.at)]),
        tuple(f"{name}: {why}" for name, why in {it.limit: it.because for it in found}.items()),
    )  # fmt: skip


def _wanted(found: Sequence[Point]) -> list[str]:
    """Panels that have something to show: more than one value along their axis."""
    several = {
        name: len({getattr(point, name) for point in found}) > 1
        for name in ("ranks", "concurrency")
    }
    wanted = [name for name in plot.PANELS if several[name.rpartition(" ")[2]]]
    return wanted or list(plot.PANELS)[:1]


def _why(found: Sequence[Point]) -> str:
    at = sweep.verdict(found).at
    if sweep.doubt(found):
        return f"As far as such epochs tell: {at.limit}: {at.because}."
    return f"{at.because[:1].upper()}{at.because[1:]}. {at.advice}."


def _what(about: dict[str, Any]) -> str:
    one = about["sweep"]
    mean = f", {one['bytes'] / one['entries'] / 1e3:,.0f} kB on average" if one["bytes"] else ""
    return f"{printable(one['source'])}: {one['entries']:,} files{mean}."


def warnings(table: pa.Table, baseline: pa.Table | None = None) -> list[str]:
    """What makes the figures of a sweep, or their comparison, doubtful; a sentence each.

    Raises:
        ReceiptError: there is no measured epoch, or a table is of no sweep.
    """
    found, about = measured(table), sweep.about(table)
    astray, epochs = sum(it.astray for it in found), sum(it.epochs for it in found)
    said = []
    if astray:
        cache = about["sweep"]["plan"]["cache"]
        said.append(
            f"In {astray} of {epochs} epochs the page cache was not {cache}, as was asked: "
            f"{_named([it for it in found if it.astray])}."
        )
    busy = [it for it in found if it.others_share >= OTHERS]
    if busy:
        share = max(it.others_share for it in busy)
        said.append(
            f"Other programs used {share:.0%} of the CPUs ({_named(busy)}): stop them and measure "
            "again."
        )
    if baseline is not None and (differing := sweep.differences(table, baseline)):
        said.append(printable(f"The baseline is of something else: {', '.join(differing)}."))
    places = {(one["host"], one["commit"], one["ray"]) for one in about["sessions"]}
    if len(places) > 1:
        said.append("The records come from different machines or versions: see below.")
    return said


def _named(found: Sequence[Point]) -> str:
    """The first few points by name, and how many more there are."""
    more = [f"{len(found) - _NAMED} more"] if len(found) > _NAMED else []
    return ", ".join([*(it.name for it in found[:_NAMED]), *more])


def _environment(about: dict[str, Any]) -> Grid:
    names = ("time", "host", "storage", "endpoint", "kernel", "machine", "cpus_allowed",
             "memory_bytes", "load", "rayloader", "commit", "engine", "python", "ray", "torch",
             "pyarrow")  # fmt: skip
    sessions = about["sessions"]
    rows = [
        (name.replace("_", " "), *(_shown(session.get(name)) for session in sessions))
        for name in names
        if any(session.get(name) is not None for session in sessions)
    ]
    columns = ("<", *(f"<run {number + 1}" for number in range(len(sessions))))
    return Grid("", columns, tuple(rows))


def _method(about: dict[str, Any]) -> str:
    one, plan = about["sweep"], about["sweep"]["plan"]
    options = one["options"]
    compute = one["compute_seconds"]
    step = f", {compute * 1e3:g} ms of compute per batch" if compute else ""
    return (
        f"{counted(plan['repeats'], 'trial')} of each point in random order (seed "
        f"{plan['seed']}), each with one epoch of warm-up that does not count and "
        f"{plan['epochs']} measured; page cache: {plan['cache']}. "
        f"Batches of {options['batch_size']}, "
        f"{'delivered' if options['deliver'] else 'dropped in the reader'}{step}; memory "
        f"{options['memory_bytes'] >> 20} MiB per rank; O_DIRECT {options['direct']}. GB = 10^9 "
        "bytes, MB = 10^6. Points are medians, whiskers the slowest and the fastest epoch."
    )


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.2f}"
    if isinstance(value, int):
        return f"{value:,}"
    return "" if value is None else printable(str(value))
