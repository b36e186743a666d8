"""Sweeps end to end: trials on a real Fleet, interrupted, resumed, and drawn by the command."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import rayloader
from rayloader import cluster
from rayloader.experiment import sweep

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    root = tmp_path_factory.mktemp("train")
    for number in range(80):
        (root / f"{number:02}.bin").write_bytes(os.urandom(20_000))
    return root


@pytest.fixture(scope="module")
def fleet(directory):
    with rayloader.Fleet(directory, ranks=1, batch_size=4, progress=False) as one:
        yield one
    cluster.shutdown()


class Interrupting:
    """A watch that interrupts after some trials."""

    def __init__(self, after):
        self.after = after
        self.done = []

    def trials(self, done, total):
        assert total == 4

    def trial_done(self, trial, bytes_per_second, limit):
        assert bytes_per_second > 0
        self.done.append(trial)
        if len(self.done) == self.after:
            raise KeyboardInterrupt


def test_an_interrupted_sweep_goes_on_where_it_was(fleet, tmp_path):
    how = {"ranks": [1, 2], "concurrency": [2, 8], "repeats": 1, "epochs": 1, "out": tmp_path}
    first, second = Interrupting(1), Interrupting(9)
    with pytest.raises(KeyboardInterrupt):
        fleet.sweep(**how, watch=first)
    assert (fleet.ranks, fleet.concurrency) == (1, 64)
    table = fleet.sweep(**how, watch=second)
    assert (fleet.ranks, fleet.concurrency, len(fleet.pids)) == (1, 64, 1)
    assert len(first.done + second.done) == len({*first.done, *second.done}) == 4
    assert table.num_rows == 4 * 2
    assert {(row["ranks"], row["concurrency"]) for row in table.to_pylist()} == {
        (1, 2), (1, 8), (2, 2), (2, 8)
    }  # fmt: skip
    assert all(row["files"] == 80 for row in table.to_pylist())
    assert all(row["peak_in_flight"] <= row["ranks"] * row["concurrency"]
               for row in table.to_pylist())  # fmt: skip
    sessions = sweep.about(table)["sessions"]
    assert len(sessions) == 2
    assert {"host", "ray", "storage", "kernel", "cpus_allowed"} <= set(sessions[0])
    assert (tmp_path / "results.parquet").exists()


@pytest.mark.parametrize("cache", ["hot", "cold"])
def test_the_page_cache_is_made_as_asked_and_looked_at(fleet, directory, cache):
    if fleet.page_cache(drop=True) != 0:
        pytest.skip("this file system does not let go of its page cache")
    table = fleet.sweep([1], repeats=1, epochs=2, cache=cache)
    measured = [row for row in table.to_pylist() if not row["warm_up"]]
    assert [row["cache_as_asked"] for row in measured] == [True, True]
    assert [row["cached_before"] for row in measured] == [1.0 if cache == "hot" else 0.0] * 2


def run(*words):
    """Run the command."""
    return subprocess.run(
        [sys.executable, "-m", "rayloader.cli", *words],
        cwd=ROOT, capture_output=True, text=True, timeout=100,
    )  # fmt: skip


def test_the_commands_measure_and_draw(directory, tmp_path):
    out = str(tmp_path / "out")
    ran = run("sweep", str(directory), "--ranks", "1", "--concurrency", "2,8", "--repeats", "1",
              "--epochs", "1", "--batch-size", "4", "--out", out)  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "Epochs were too short to tell" in ran.stdout
    assert "in flight per rank" in ran.stdout
    assert sorted(os.listdir(out)) == [
        "records.jsonl", "report.html", "results.parquet", "sweep.png"
    ]  # fmt: skip
    first = (tmp_path / "out" / "report.html").read_text()
    again = run("report", out)
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "out" / "report.html").read_text() == first
    compared = run("report", out, "--baseline", out)
    assert "1.00 x" in compared.stdout
    assert "of something else" not in compared.stdout
    assert f"the baseline, {out}, measured " in (tmp_path / "out" / "report.html").read_text()
    nothing = run("report", str(tmp_path))
    assert nothing.returncode == 2
    assert "no records of a sweep" in nothing.stderr


@pytest.mark.timeout(120)
def test_files_of_several_sizes_are_made_and_measured(tmp_path):
    out = str(tmp_path / "out")
    ran = run("sweep", str(tmp_path / "made"), "--size", "1kB,50kB", "--files", "40",
              "--ranks", "1", "--concurrency", "4", "--repeats", "1", "--epochs", "1",
              "--out", out)  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert sorted(os.listdir(out)) == ["1000", "50000", "report.html"]
    assert "Fastest with files of" in (tmp_path / "out" / "report.html").read_text()
    assert run("report", out).stdout.strip() == f"{out}/report.html"
