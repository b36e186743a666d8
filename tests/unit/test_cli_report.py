"""What ``rayloader read`` counts and how it adds it up."""

import dataclasses
import os
import subprocess
import sys

import pytest
from rich.console import Console

from rayloader.catalog import Catalog
from rayloader.config import Options
from rayloader.errors import counted
from rayloader.experiment import live, report
from rayloader.experiment.grid import Grid
from rayloader.experiment.pagecache import cached_share
from rayloader.experiment.processes import Census
from rayloader.experiment.ranks import Done, Moved
from rayloader.experiment.read import EpochResult, LoaderResult, ReadJob, ReadResult
from rayloader.launch import RUN_ID
from rayloader.receipt import Receipt

SLEEP = "import time; time.sleep(60)"
PARENT = (
    f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEP!r}], env={{'A': 'b'}})"
)


def done(epoch, rank, first_at, ended_at, nbytes):
    receipt = Receipt(epoch=epoch, rank=rank, world_size=2, files=10, bytes=nbytes, seconds=2.0)
    return Done(epoch, first_at, ended_at, receipt.asdict())


@pytest.fixture
def two_epochs():
    first = EpochResult(
        0, 100.0, None, (done(0, 0, 100.5, 102.0, 3 * 10**9), done(0, 1, 101, 104, 10**9)), 12
    )
    second = EpochResult(
        1, 105.0, first.ended_at, (done(1, 0, 105.1, 106, 10**9), done(1, 1, 105.2, 107, 10**9)), 0
    )
    return first, second


@pytest.fixture
def result(two_epochs):
    catalog = Catalog.of_files([f"{number}.bin" for number in range(20)])
    options = Options(batch_size=5)
    ours = LoaderResult("rayloader", 4.0, 1.0, two_epochs)
    theirs = LoaderResult("torch-respawned", 2.0, None, two_epochs)
    return ReadResult(ReadJob("x", 2, 2, options, compare=True), catalog, 0.5, (ours, theirs))


def shown(table, width=100):
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(table)
    console.file.close()
    return console.export_text()


def test_the_rate_of_all_ranks_is_all_bytes_from_the_common_start_to_the_last_end(two_epochs):
    first, second = two_epochs
    assert (first.bytes, first.seconds, first.files) == (4 * 10**9, 4.0, 20)
    assert first.asdict()["bytes_per_second"] == 10**9
    assert first.first_batch_seconds == 1.0
    assert first.gap_seconds == 0.0
    assert second.gap_seconds == pytest.approx(1.2)


def test_the_table_has_a_line_per_epoch_and_rank_and_one_for_all(result):
    lines = [line.split() for line in shown(report.ranks_table(result.loaders[0])).splitlines()]
    body = [line for line in lines if line and line[0] not in ("first", "epoch")]
    assert [line[0] for line in body] == ["0", "1", "all", "1", "1", "all"]
    assert body[2][:5] == ["all", "20", "4.00", "1.00", "5"]
    assert body[5][:7] == ["all", "20", "2.00", "1.00", "10", "200", "1,200"]


def test_a_table_fits_into_a_hundred_columns(result):
    big = dataclasses.replace(result.loaders[0].epochs[0].ranks[0])
    big.receipt.update(files=12_345_678, bytes=10**13, gap_seconds=99.0, stall_seconds=999.0)
    for table in (report.ranks_table(result.loaders[0]), report.comparison_table(result)):
        text = shown(table)
        assert max(map(len, text.splitlines())) <= 100
        assert "…" not in text


@pytest.mark.parametrize("width", [30, 60, 80])
def test_a_narrow_terminal_gets_the_columns_below_each_other_and_every_figure(result, width):
    result.loaders[0].epochs[0].ranks[0].receipt.update(
        files=12_345_678, restarts=1, skipped=[{"key": "a", "cause": "b"}]
    )
    table = report.ranks_table(result.loaders[0])
    wide, narrow = shown(table), shown(table, width)
    assert max(map(len, narrow.splitlines())) <= width
    assert "…" not in narrow
    assert set(wide.split()) == set(narrow.split())
    parts = narrow.split("epoch")[1:]
    assert all(part.count(" all") == 2 for part in parts)


def test_columns_in_which_nothing_happened_go_first(result):
    table = report.ranks_table(result.loaders[0])
    assert "starts" in shown(table)
    assert "starts" not in shown(table, 80)
    assert shown(table, 80).count("epoch") == 1


def test_the_comparison_keeps_every_figure_on_a_narrow_terminal(result):
    wide, narrow = (shown(report.comparison_table(result), width) for width in (100, 60))
    assert "…" not in narrow
    assert set(wide.split()) == set(narrow.split())


def test_a_grid_keeps_every_figure_on_a_narrow_terminal():
    columns = ("ranks", "in flight\nper rank", *(f"column {n}" for n in range(8)), "<limit")
    row = ("12", "64", *(f"{n}{n},000.00" for n in range(8)), "storage")
    table = Grid("A title", columns, (row,)).table()
    text = shown(table, 60)
    assert max(map(len, text.splitlines())) <= 60
    assert text.count("A title") == 1
    rows = [line.split() for line in text.splitlines() if line.startswith("   12 ")]
    assert len(rows) > 1
    assert all(cells[:2] == ["12", "64"] for cells in rows)
    assert set(row) <= set(text.split())


def test_the_comparison_keeps_the_first_epoch_apart(result):
    text = shown(report.comparison_table(result))
    later, first = text.split("epoch 0")
    assert "epochs 1 to 1, median" in later
    assert "1.0 x" in later
    assert "1.0 x" in first


def test_a_run_that_was_interrupted_compares_only_whole_loaders(result):
    ours, theirs = result.loaders
    partial = dataclasses.replace(theirs, loader="torch-kept", epochs=theirs.epochs[:1])
    cut = dataclasses.replace(result, loaders=(ours, partial), interrupted=True)
    text = "".join(shown(part) for part in report.parts(cut))
    assert "INTERRUPTED after 3 of 8 epochs" in text
    assert "side by side" not in text
    assert report.document(cut, ["rayloader"])["interrupted"] is True
    cut = dataclasses.replace(result, loaders=(ours, theirs, partial), interrupted=True)
    text = "".join(shown(part) for part in report.parts(cut))
    assert "respawned" in text
    assert "kept" not in text


def test_progress_counts_in_words_and_never_below_nothing():
    speed = live._Speed()
    speed.text(Moved(0, 1, 9, 8, 100, 5.0))
    assert ", 0 in flight" in speed.text(Moved(0, 2, 9, 16, 200, 4.9))
    assert counted(1, "rank") == "1 rank"
    assert counted(1000, "rank") == "1,000 ranks"


def test_few_reads_in_flight_are_explained_where_files_were_cached(result):
    ours = result.loaders[0]
    assert "need few in flight" in report.legend(result)
    cold = dataclasses.replace(result, loaders=(dataclasses.replace(ours, cached=0.5),))
    assert "need few in flight" not in report.legend(cold)
    ours.epochs[0].ranks[0].receipt["peak_in_flight"] = 64
    assert "need few in flight" not in report.legend(result)


def test_the_comparison_says_what_of_torchs_is_run(result):
    legend = report.comparison_legend(result)
    assert "collate_fn" in legend
    assert "Workers per rank: 2" in legend


def test_what_was_left_out_is_named_and_the_rest_counted(result):
    receipt = result.loaders[0].epochs[1].ranks[1].receipt
    receipt["skipped"] = [{"key": f"{number}\n", "cause": "no such file"} for number in range(7)]
    lines = report.skipped(result.loaders[0])
    assert lines[0] == "left out: 0\\n: no such file (epoch 1, rank 1)"
    assert len(lines) == 6
    assert lines[5] == "and 2 more"


def test_the_document_holds_every_field_of_every_receipt(result):
    document = report.document(result, ["rayloader", "read"])
    fields = {field.name for field in dataclasses.fields(Receipt)}
    for loader in document["loaders"]:
        for epoch in loader["epochs"]:
            assert all(set(receipt) == fields for receipt in epoch["receipts"])
    assert document["options"]["batch_size"] == 5
    assert document["environment"]["cpu_count"] == os.cpu_count()


def test_the_census_sees_what_a_run_starts_and_what_that_starts():
    census = Census("one run")
    assert census.appeared() == 0
    environ = {**os.environ, RUN_ID: "one run"}
    with subprocess.Popen([sys.executable, "-c", PARENT], env=environ):
        try:
            found = census.appeared()
            while found < 2:
                found += census.appeared()
            assert len(census.living()) == 2
            assert census.appeared() == 0
            assert not census.wait_until_gone(0.05)
        finally:
            for pid in census.living():
                os.kill(pid, 9)
    assert census.wait_until_gone(5)


def test_the_census_does_not_count_another_run():
    census = Census("one run")
    environ = {**os.environ, RUN_ID: "one run and more"}
    with subprocess.Popen([sys.executable, "-c", SLEEP], env=environ) as other:
        try:
            assert census.appeared() == 0
        finally:
            other.kill()


def test_the_cached_share_falls_when_files_are_dropped_from_the_cache(tmp_path):
    for number in range(8):
        with open(tmp_path / str(number), "wb") as file:
            file.write(bytes(1 << 20))
            os.fsync(file.fileno())
    catalog = Catalog.from_source(tmp_path)
    before = cached_share(catalog)
    for number in range(8):
        with open(tmp_path / str(number), "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert before > 0.9
    assert cached_share(catalog) < before / 2


def test_the_cached_share_of_what_cannot_be_opened_is_unknown(tmp_path):
    assert cached_share(Catalog.of_files([tmp_path / "missing"])) is None
