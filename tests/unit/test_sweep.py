"""A sweep's records, and what is made of them: table, points, verdict, pictures, page."""

import dataclasses
import json
import re
import shutil
import subprocess

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import rayloader
from rayloader import cli
from rayloader.catalog import Catalog
from rayloader.config import Options
from rayloader.errors import OptionError, ReceiptError
from rayloader.experiment import page, plot, sweep
from rayloader.experiment.sweep import Records, SweepPlan, Trial

PLAN = SweepPlan(ranks=(1, 2, 4), concurrency=(1, 8), epochs=2, repeats=2, cache="cold")
GB = 10**9


@pytest.fixture
def about(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a<b>").write_bytes(b"x" * 1000)
    catalog = Catalog.from_source(tmp_path / "data", stat=True)
    return sweep.subject(PLAN, catalog, Options(), 0.0, False)


def rate(ranks, concurrency):
    """GB/s of a storage that ends at 2 GB/s: linear to two ranks, no further."""
    return min(ranks, 2.1) * min(concurrency, 4) / 4


def report(ranks, concurrency, number, factor=1.0, cached=0.0, seconds=2.0, busy=0.3):
    speed = rate(ranks, concurrency) * GB * factor
    name = "storage bandwidth" if ranks > 2 else "storage latency"
    return {
        "epoch": number, "seconds": seconds, "files": 10, "bytes": int(2 * speed),
        "bytes_per_second": speed, "files_per_second": 5.0, "latency_p50": 0.004,
        "latency_p99": 0.02, "stall_share": 0.9, "peak_in_flight": concurrency * ranks,
        "restarts": 0, "ranks": [{"host": "h"}] * ranks, "cached_before": cached,
        "cache_as_asked": sweep.was_as_asked("cold", cached),
        "limit": {"name": name, "because": f"a reason <{name}>", "advice": "More of it helps"},
        "evidence": {"in_flight": concurrency * 0.9, "cpu_share": 0.2, "node_busy": busy},
    }  # fmt: skip


def trial(ranks, concurrency, repeat, **how):
    epochs = [report(ranks, concurrency, 0, 0.1, cached=None)]
    epochs += [report(ranks, concurrency, n, 1 + repeat / 10 + n / 100, **how) for n in (1, 2)]
    return {"kind": "trial", "ranks": ranks, "concurrency": concurrency, "repeat": repeat,
            "order": 0, "ended": 0.0, "epochs": epochs}  # fmt: skip


def records(about, **how):
    session = {"kind": "session", "host": "h", "commit": None, "ray": "2", "time": "t",
               "storage": "ext4 on /", "memory_bytes": 5}  # fmt: skip
    return [about, session, *(trial(it.ranks, it.concurrency, it.repeat, **how)
                              for it in PLAN.trials)]  # fmt: skip


@pytest.fixture
def table(about):
    return sweep.table_of(records(about))


# Trials and records


def test_every_point_is_tried_as_often_in_an_order_that_the_seed_decides():
    trials = PLAN.trials
    expected = [Trial(r, c, n) for n in range(2) for r in (1, 2, 4) for c in (1, 8)]
    assert sorted(trials) == sorted(expected)
    assert trials != expected
    assert trials == PLAN.trials
    other = SweepPlan(ranks=(1, 2, 4), concurrency=(1, 8), epochs=2, repeats=2, seed=1)
    assert other.trials != trials


@pytest.mark.parametrize(
    "wrong",
    [{"ranks": ()}, {"ranks": (0,)}, {"concurrency": (1, 1)}, {"ranks": (True,)},
     {"epochs": 0}, {"repeats": 0}, {"cache": "warm"}],
)  # fmt: skip
def test_what_cannot_be_swept_is_said(wrong):
    name = next(iter(wrong))
    with pytest.raises(OptionError, match=f"{name}="):
        SweepPlan(**{"ranks": (1,), "concurrency": (1,), **wrong})


@pytest.mark.parametrize(
    ("cache", "share", "expected"),
    [("any", 0.5, None), ("hot", None, None), ("hot", 0.99, True), ("hot", 0.5, False),
     ("cold", 0.0, True), ("cold", 0.5, False)],
)  # fmt: skip
def test_whether_the_page_cache_was_as_asked(cache, share, expected):
    assert sweep.was_as_asked(cache, share) is expected


def test_records_go_on_after_a_line_that_was_cut_short(tmp_path, about):
    directory = str(tmp_path / "out")
    first = Records(directory, about)
    first.add(trial(1, 8, 0))
    path = tmp_path / "out" / "records.jsonl"
    with path.open("a") as file:
        file.write('{"kind": "trial", "ranks": 2')
    again = Records(directory, about)
    assert again.done == {Trial(1, 8, 0)}
    again.add(trial(2, 8, 0))
    assert Records(directory, about).done == {Trial(1, 8, 0), Trial(2, 8, 0)}
    assert len(sweep.load(directory)) == 3


def test_records_of_another_sweep_are_not_mixed_in(tmp_path, about):
    Records(str(tmp_path / "out"), about)
    changed = {**about, "options": {**about["options"], "batch_size": 7}, "touch": True}
    with pytest.raises(OptionError, match=r"another sweep \(batch_size, touch differ\)"):
        Records(str(tmp_path / "out"), changed)


def test_what_are_no_records_is_said(tmp_path, about):
    with pytest.raises(ReceiptError, match="no records of a sweep"):
        sweep.load(str(tmp_path))
    (tmp_path / "records.jsonl").write_text('{"kind": "other"}\n')
    with pytest.raises(ReceiptError, match="not records of a sweep"):
        sweep.load(str(tmp_path))
    Records(str(tmp_path / "out"), about)
    with pytest.raises(ReceiptError, match="no trial"):
        sweep.load(str(tmp_path / "out"))


# The table


def test_the_table_has_a_row_per_epoch_and_says_what_it_is_of(table, about, tmp_path):
    assert table.num_rows == 12 * 3
    assert table.column_names == list(sweep.COLUMNS)
    assert sum(table["warm_up"].to_pylist()) == 12
    sweep.save_table(table, str(tmp_path))
    again = pq.read_table(tmp_path / "results.parquet")
    assert again.equals(table)
    assert sweep.about(again)["sweep"] == json.loads(json.dumps(about))
    with pytest.raises(ReceiptError, match="metadata"):
        sweep.about(pa.table({"ranks": [1]}))


def test_points_are_medians_without_the_warm_up(table):
    found = {(it.ranks, it.concurrency): it for it in sweep.points(table)}
    assert sorted(found) == [(r, c) for r in (1, 2, 4) for c in (1, 8)]
    point = found[2, 8]
    assert (point.epochs, point.astray) == (4, 0)
    assert point.rate == pytest.approx(2 * GB * 1.065)
    assert (point.low, point.high) == pytest.approx((2.02 * GB, 2.24 * GB))


def test_scaling_stops_at_the_fewest_ranks_that_are_about_as_fast(table):
    seen = sweep.verdict(sweep.points(table))
    assert (seen.stops_at, seen.best.ranks, seen.at.concurrency) == (2, 4, 8)
    assert seen.efficiency == pytest.approx(1)
    assert plot.headline(sweep.points(table)) == (
        "Scaling stops at 2 ranks: 2.13 GB/s; limit: storage bandwidth"
    )
    up_to_two = [point for point in sweep.points(table) if point.ranks <= 2]
    assert sweep.verdict(up_to_two).stops_at is None
    assert plot.headline(up_to_two).startswith("Still scaling at 2 ranks: 2.13 GB/s, 100% of")
    alone = [point for point in sweep.points(table) if point.ranks == 1]
    assert plot.headline(alone) == "1.06 GB/s at 8 in flight per rank; limit: storage latency"


def test_more_in_flight_is_no_advice_where_the_same_sweep_shows_that_it_gave_no_more(table):
    found = {(it.ranks, it.concurrency): it for it in sweep.points(table)}
    assert found[1, 8].limit == found[2, 1].limit == "storage latency"
    point = found[2, 8]
    assert point.limit == "storage bandwidth"
    assert "yet 4 ranks x 8 in flight gave 1.05 times the rate" in point.because


def test_a_latency_that_more_in_flight_does_not_hide_is_none(about):
    lines = records(about)
    for line in lines:
        for one in line.get("epochs", ()):
            one["limit"] = {**one["limit"], "name": "storage latency"}
    found = {(it.ranks, it.concurrency): it for it in sweep.points(sweep.table_of(lines))}
    assert (found[2, 8].limit, found[4, 8].limit) == ("unclear", "storage latency")
    assert "did not help" in found[2, 8].advice


def test_a_headline_of_short_epochs_says_that_they_tell_nothing(about):
    short = sweep.table_of(records(about, seconds=0.04))
    text = plot.headline(sweep.points(short))
    assert text.startswith("Epochs were too short to tell (0.04 s, 0.5 s is the least)")
    assert "2.13 GB/s at 2 ranks x 8 in flight per rank" in text
    assert "linear" not in text
    assert "limit" not in text
    title = re.search("<h1>(.*?)</h1>", page.page_of_sizes([short]))[1]
    assert "; but epochs were too short to tell" in title
    assert "As far as such epochs tell: storage bandwidth: a reason" in page.page(short)
    figure = rayloader.plot(short, short, baseline_name="a/" * 200)
    assert not figure.axes[0].texts
    figure.draw_without_rendering()
    for text in figure.texts:
        assert text.get_window_extent().width <= figure.bbox.width


def test_a_headline_of_scattered_epochs_says_so(table):
    def spread(low, high):
        return [dataclasses.replace(it, low=it.rate * low, high=it.rate * high)
                for it in sweep.points(table)]  # fmt: skip

    said = "Epochs were too scattered to tell"
    assert plot.headline(spread(0.6, 1.4)).startswith(said)  # as fast as fewer ranks, at times
    alone = [it for it in spread(0.6, 1.4) if it.ranks == 1]
    assert plot.headline(alone).startswith(said)
    assert not plot.headline(spread(0.8, 1.2)).startswith(said)


# Pictures and the page


def test_the_picture_shows_throughput_and_latency_against_ranks_and_concurrency(table, tmp_path):
    figure = rayloader.plot(table, baseline=table)
    titles = [axes.get_title("left") for axes in figure.axes]
    latency = "A read's latency, median to 99 %"
    rates = ["Throughput against ranks", "Throughput against concurrency"]
    assert titles == [*rates, latency, latency]
    legend = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert set(legend) == {"1", "8", "linear", "baseline"}
    assert figure._repr_png_().startswith(b"\x89PNG")


def scaled(table, factors):
    """Points whose rates are multiplied, by their ranks."""
    return [
        dataclasses.replace(it, rate=it.rate * by, low=it.low * by, high=it.high * by)
        for it in sweep.points(table)
        for by in [factors[it.ranks]]
    ]


def drawn(name, found, before=()):
    """The axes of a panel."""
    axes = plot._figure(plot.require_matplotlib(), 5, 4).subplots()
    plot.PANELS[name](axes, found, before)
    return axes


def test_no_measured_point_leaves_the_panel(table):
    better_than_linear = scaled(table, {1: 1, 2: 3, 4: 8})
    for name in ("rate by ranks", "rate by concurrency"):
        top = drawn(name, better_than_linear).get_ylim()[1]
        assert top >= max(point.high for point in better_than_linear) / GB
        top = drawn(name, sweep.points(table), better_than_linear).get_ylim()[1]
        assert top >= max(point.rate for point in better_than_linear) / GB


def test_the_same_line_has_the_same_colour_in_the_baseline_which_the_legend_names(table):
    found = [it for it in sweep.points(table) if it.concurrency == 8 and it.ranks < 4]
    axes = drawn("rate by ranks", found, sweep.points(table))
    solid = {line.get_color() for line in axes.get_lines() if line.get_marker() == "s"}
    dashed = [line.get_color() for line in axes.get_lines() if line.get_linestyle() == "--"]
    assert solid == {plot._COLOURS[1]}
    assert dashed[:2] == list(plot._COLOURS[:2])
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1", "2", "4"]
    assert "baseline" in [text.get_text() for text in axes.get_legend().get_texts()]


def test_the_limit_is_named_inside_the_panel(table):
    for factors, rank in (({1: 1, 2: 0.5, 4: 0.25}, 1), ({1: 1, 2: 1, 4: 2}, 4)):
        axes = drawn("rate by ranks", scaled(table, factors))
        axes.figure.draw_without_rendering()
        (label,) = axes.texts
        assert label.xy[0] == rank
        inside = axes.get_window_extent().padded(1)
        for x, y in label.get_window_extent().corners():
            assert inside.contains(x, y)


def test_whiskers_of_two_lines_at_the_same_place_stand_beside_each_other(table):
    for name in ("rate by ranks", "rate by concurrency"):
        lines = [line for line in drawn(name, sweep.points(table)).get_lines()
                 if line.get_linestyle() == "-" and line.get_marker() in ("o", "s")]  # fmt: skip
        assert lines[0].get_xdata()[0] != lines[1].get_xdata()[0]


def test_the_page_needs_nothing_else_and_is_a_function_of_the_records(table):
    text = page.page(table)
    assert text == page.page(table)
    assert text.count("<svg") == 4
    for address in re.findall(r"(?:src|href|url)\s*[=(]\s*[\"']?([^\"')>\s]+)", text):
        assert address.startswith("#"), address
    for needed in ("<h1>Scaling stops at 2 ranks", "name=\"viewport\"", "@media print",
                   "A reason &lt;storage latency&gt;; yet 4 ranks x 8 in flight gave 1.05 times",
                   ": a reason &lt;storage bandwidth&gt;. More of it helps.",
                   "ext4 on /"):  # fmt: skip
        assert needed in text
    assert 'class="warning"' not in text


def test_the_page_warns_of_what_was_not_as_asked(about):
    lines = records(about, cached=0.8)
    lines.append({**lines[1], "host": "another"})
    text = page.page(sweep.table_of(lines))
    assert "In 24 of 24 epochs the page cache was not cold, as was asked: 1 rank x 1 in " in text
    assert "1 rank x 8 in flight, 2 ranks x 1 in flight, 3 more." in text
    assert "different machines or versions" in text


def test_the_page_warns_of_programs_that_hold_the_cpus(about):
    assert page.warnings(sweep.table_of(records(about, busy=0.39))) == []
    table = sweep.table_of(records(about, busy=0.9))
    (text,) = page.warnings(table)
    assert text.startswith("Other programs used 70% of the CPUs (1 rank x 1 in flight, ")
    assert text.endswith("stop them and measure again.")
    assert text in page.page(table)
    lines = records(about, busy=0.9)
    for line in lines:
        for one in line.get("epochs", ()):
            one["ranks"] = [{"host": str(rank)} for rank in range(2)]
    assert page.warnings(sweep.table_of(lines)) == []  # of several nodes only the busiest is known
    lines = records(about, busy=0.9)
    lines[1] |= {"cpu_count": 8, "cpus_allowed": 2}
    assert page.warnings(sweep.table_of(lines)) == []  # nor who uses the other six CPUs


def test_what_the_dashed_lines_are_is_said_and_that_they_are_of_something_else(table, about):
    options = {**about["options"], "batch_size": 7}
    plan = {**about["plan"], "ranks": [1], "repeats": 9}
    other = {**about, "options": options, "plan": plan, "entries": 5}
    baseline = sweep.table_of(records(other))
    text = page.page(table, baseline, "old<er")
    assert "Dashed: the baseline, old&lt;er, measured t UTC." in text
    assert "The baseline is of something else: batch_size 7 (here 1), files 5 (here 1)." in text
    assert "something else" not in page.page(table, table)
    figure = rayloader.plot(table, baseline, baseline_name="older")
    assert figure.get_supxlabel() == "Dashed: the baseline, older, measured t UTC"
    assert rayloader.plot(table).get_supxlabel() == ""


def test_the_command_says_the_same_warnings(about, tmp_path):
    for name, one, busy in (("new", about, 0.9), ("old", {**about, "entries": 5}, 0.3)):
        for line in records(one, busy=busy)[1:]:
            Records(str(tmp_path / name), one).add(line)
    ran = CliRunner().invoke(
        cli.cli, ["report", str(tmp_path / "new"), "--baseline", str(tmp_path / "old")]
    )
    assert ran.exit_code == 0, ran.output
    assert "warning: Other programs used 70% of the CPUs" in ran.output
    assert "warning: The baseline is of something else: files 5 (here 1)." in ran.output
    text = (tmp_path / "new" / "report.html").read_text()
    assert f"Dashed: the baseline, {tmp_path / 'old'}, measured" in text


def test_two_sweeps_are_compared(table, about):
    faster = [line if line["kind"] != "trial" else
              {**line, "epochs": [{**one, "bytes_per_second": 2 * one["bytes_per_second"]}
                                  for one in line["epochs"]]}
              for line in records(about)]  # fmt: skip
    grid = page.grid(sweep.points(sweep.table_of(faster)), sweep.points(table))
    assert "of the\nbaseline" in grid.columns
    assert {row[4] for row in grid.rows} == {"2.00 x"}


def test_sweeps_of_several_sizes_are_one_page(about, tmp_path):
    for size in (4_000_000, 1000):
        one = {**about, "bytes": size * about["entries"]}
        directory = tmp_path / "out" / str(size)
        for line in records(one)[1:]:
            Records(str(directory), one).add(line)
    several = sweep.load_sizes(str(tmp_path / "out"))
    tables = [sweep.table_of(each) for each in several]
    assert [sweep.file_bytes(table) for table in tables] == [1000, 4_000_000]
    text = page.page_of_sizes(tables)
    assert "<h1>Fastest with files of 1 kB: 2.24 GB/s" in text
    assert "Files of 4 MB: Scaling stops at 2 ranks" in text
    assert text.count("<svg") == 1 + 2 * 4
    ids = re.findall(r'clipPath id="(.*?)"', text)
    assert len(ids) == len(set(ids))
    assert sweep.load_sizes(str(tmp_path / "out" / "1000")) == []


def browser():
    return shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.skipif(browser() is None, reason="needs Chromium to look at the page")
@pytest.mark.parametrize("width", [500, 1600])
def test_the_page_fits_in_a_real_browser(table, tmp_path, width):
    measure = (
        "<script>document.title = [window.innerWidth, document.documentElement.scrollWidth, "
        "document.querySelectorAll('svg').length, "
        "document.querySelector('svg').getBoundingClientRect().width > 300].join()</script>"
    )
    (tmp_path / "report.html").write_text(page.page(table).replace("</body>", measure + "</body>"))
    ran = subprocess.run(
        [browser(), "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom",
         f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},900",
         (tmp_path / "report.html").as_uri()],
        capture_output=True, text=True, timeout=50,
    )  # fmt: skip
    inner, scrolled, figures, wide = re.search(r"<title>(.*?)</title>", ran.stdout)[1].split(",")
    assert int(scrolled) <= int(inner) <= width
    assert (figures, wide) == ("4", "true")
