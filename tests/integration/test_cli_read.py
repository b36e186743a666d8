"""``rayloader read`` as people run it: real ranks, a real private Ray, real ends."""

import contextlib
import dataclasses
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import rayloader
from rayloader.catalog import Catalog
from rayloader.plan import EpochPlan, Shard
from rayloader.receipt import Fingerprint, Receipt, name_hashes
from tests.census import Census

RAYLOADER = "from rayloader.cli import main; main()"
FILES, SIZE = 50, 3000
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    root = tmp_path_factory.mktemp("read")
    for number in range(FILES):
        (root / f"{number:03}.bin").write_bytes(np.random.default_rng(number).bytes(SIZE))
    return root


def started(census, *arguments, **environ):
    return census.start(RAYLOADER, "read", *map(str, arguments), **environ)


def ended(process, seconds=120):
    """Exit status, standard output and standard error."""
    out, err = process.popen.communicate(timeout=seconds)
    return process.popen.returncode, out.decode(), err.decode()


def reading(census, process, seconds=60):
    """Wait until the first epoch is under way; the rank processes' ids."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert process.popen.poll() is None, process.popen.stderr.read().decode()
        running = census.processes()
        if any("ReaderActor" in line for line in running.values()):
            return sorted(pid for pid, line in running.items() if "experiment.consumer" in line)
        time.sleep(0.1)
    raise AssertionError("no reader within a minute")


@pytest.fixture(scope="module")
def compared(directory, tmp_path_factory):
    """Two ranks, three epochs, torch beside it: everything that was said, and what was left."""
    file = tmp_path_factory.mktemp("json") / "all.json"
    census = Census()
    try:
        process = started(
            census, directory, "--ranks", 2, "--epochs", 3, "--batch-size", 8, "--seed", 5,
            "--compare", "torch", "--json", file, "--compute-seconds", 0.03,
        )  # fmt: skip
        status, out, err = ended(process)
        assert status == 0, err
        return json.loads(file.read_text()), out, err, census.left()
    finally:
        census.close()


def test_every_epoch_of_every_rank_is_what_its_plan_says(compared, directory):
    document, *_ = compared
    catalog = Catalog.from_source(directory)
    assert document["catalog"]["digest"] == catalog.digest
    (ours,) = [loader for loader in document["loaders"] if loader["loader"] == "rayloader"]
    for epoch in ours["epochs"]:
        for receipt in epoch["receipts"]:
            plan = EpochPlan(FILES, Shard(receipt["rank"], 2), 8, receipt["epoch"], seed=5)
            entries = np.concatenate(list(plan.batches()))
            order = Fingerprint.of(name_hashes(*catalog.blob_at(entries))).order
            assert receipt["order_hash"] == f"{order:016x}"
            assert (receipt["files"], receipt["bytes"]) == (FILES // 2, FILES // 2 * SIZE)
            assert set(receipt) == {field.name for field in dataclasses.fields(Receipt)}


def test_after_the_start_rayloader_makes_no_process_and_respawning_does(compared):
    document, *_ = compared
    started = {
        loader["loader"]: [epoch["processes_started"] for epoch in loader["epochs"]]
        for loader in document["loaders"]
    }
    assert started["rayloader"][1:] == [0, 0]
    assert started["torch-kept"] == [6, 0, 0]
    assert started["torch-respawned"] == [6, 4, 4]
    assert started["torch-in-process"] == [2, 0, 0]


def test_the_peer_reads_the_same_files_in_as_many_batches(compared):
    document, *_ = compared
    for loader in document["loaders"]:
        for epoch in loader["epochs"]:
            assert epoch["bytes"] == FILES * SIZE
            assert [receipt["steps"] for receipt in epoch["receipts"]] == [4, 4]


def test_the_tables_go_to_standard_output_and_progress_to_standard_error(compared):
    _, out, err, _ = compared
    assert "epoch rank files" in out
    assert "torch DataLoader, 2 workers respawned" in out
    lines = err.splitlines()
    assert [line.split(":")[0].strip() for line in lines] == [
        "rayloader", "epoch 0", "epoch 1", "epoch 2",
        "torch DataLoader, 2 workers kept", "epoch 0", "epoch 1", "epoch 2",
        "torch DataLoader, 2 workers respawned", "epoch 0", "epoch 1", "epoch 2",
        "torch DataLoader, no workers", "epoch 0", "epoch 1", "epoch 2",
    ]  # fmt: skip


def test_when_read_returns_nothing_that_it_started_is_left(compared):
    *_, left = compared
    assert left == []


def test_a_file_that_is_gone_is_named_once_and_ends_all_ranks(census, directory, tmp_path):
    saved = tmp_path / "saved.arrow"
    names = [f"{number:03}.bin" for number in range(FILES)]
    Catalog.of_files([*names, "gone.bin", "more.bin"], directory).save(saved)
    process = started(census, saved, "--ranks", 2, "--batch-size", 4, RAYLOADER_EPOCHS="3")
    status, out, err = ended(process)
    assert (status, out) == (1, "")
    complaints = [line for line in err.splitlines() if line.startswith("rayloader:")]
    assert len(complaints) == 1
    assert "no such file" in complaints[0]
    assert "rank" in err
    assert "Traceback" not in err
    assert len(err.splitlines()) < 12
    assert census.left() == []


def test_ctrl_c_ends_everything_with_status_130(census, directory):
    process = started(census, directory, "--ranks", 2, "--epochs", 1000, "--compute-seconds", 0.2)
    reading(census, process)
    process.popen.send_signal(signal.SIGINT)
    status, out, err = ended(process, 30)
    assert (status, out) == (130, "")
    assert err.splitlines()[-1] == "rayloader: interrupted"
    assert "Traceback" not in err
    assert census.left() == []


def after_an_epoch(process):
    """Wait until all ranks have read epoch 0."""
    for line in process.popen.stderr:
        if b"epoch 0:" in line:
            return
    raise AssertionError("it ended before")


def test_ctrl_c_keeps_the_epochs_that_all_ranks_have_read(census, directory, tmp_path):
    file = tmp_path / "all.json"
    process = started(
        census, directory, "--ranks", 2, "--epochs", 1000, "--batch-size", 5,
        "--compute-seconds", 0.1, "--json", file,
    )  # fmt: skip
    after_an_epoch(process)
    process.popen.send_signal(signal.SIGINT)
    status, out, err = ended(process, 30)
    assert (status, err.splitlines()[-1]) == (130, "rayloader: interrupted")
    document = json.loads(file.read_text())
    assert document["interrupted"] is True
    (ours,) = document["loaders"]
    assert ours["epochs"][0]["files"] == FILES
    assert f"INTERRUPTED after {len(ours['epochs'])} of 1,000 epochs" in out
    assert "epoch rank files" in out
    assert census.left() == []


def test_an_error_in_a_later_epoch_keeps_those_before_it(census, directory, tmp_path):
    data, file = tmp_path / "data", tmp_path / "all.json"
    shutil.copytree(directory, data)
    process = started(
        census, data, "--epochs", 1000, "--batch-size", 5, "--compute-seconds", 0.05, "--json", file
    )
    after_an_epoch(process)
    (data / "007.bin").unlink()
    status, out, err = ended(process, 30)
    assert status == 1
    assert "007.bin: no such file" in err
    assert "INTERRUPTED after" in out
    (ours,) = json.loads(file.read_text())["loaders"]
    assert ours["epochs"][0]["receipts"][0]["files"] == FILES


def test_being_terminated_ends_everything_with_status_143(census, directory):
    process = started(census, directory, "--epochs", 1000, "--compute-seconds", 0.2)
    reading(census, process)
    process.popen.terminate()
    status, _, err = ended(process, 30)
    assert status == 143
    assert "Traceback" not in err
    assert census.left() == []


def test_a_rank_that_is_killed_ends_the_others_and_is_named(census, directory):
    process = started(census, directory, "--ranks", 2, "--epochs", 1000, "--compute-seconds", 0.2)
    first, _ = reading(census, process)
    os.kill(first, signal.SIGKILL)
    status, _, err = ended(process, 30)
    assert status == 1
    assert "was ended by SIGKILL" in err
    assert census.left() == []


def test_nothing_survives_a_driver_that_is_killed(census, directory):
    process = started(census, directory, "--ranks", 2, "--epochs", 1000, "--compute-seconds", 0.2)
    reading(census, process)
    process.kill()
    census.gone(12)


def test_a_terminal_shows_every_rank_as_it_goes(census, directory):
    command = [
        sys.executable, "-c", RAYLOADER, "read", str(directory), "--ranks", "2",
        "--compute-seconds", "0.05", "--batch-size", "2",
    ]  # fmt: skip
    environ = census.environ(TERM="xterm", COLUMNS="100")
    terminal, its_end = pty.openpty()
    with subprocess.Popen(command, env=environ, stdout=its_end, stderr=its_end) as process:
        os.close(its_end)
        seen = b""
        with contextlib.suppress(OSError):  # EIO: nobody has the terminal open any more
            while part := os.read(terminal, 65536):
                seen += part
    os.close(terminal)
    assert process.returncode == 0
    assert b"rank 0, epoch 0" in seen
    assert b"rank 1, epoch 0" in seen
    assert b" in flight" in seen
    assert b"all: what all ranks read" in seen


@pytest.mark.parametrize("channel", ["local", "ray"])
def test_a_reader_that_cannot_be_made_says_why(census, directory, tmp_path, channel, monkeypatch):
    """Here: the package without its C extension, and an option that insists on it."""
    monkeypatch.chdir(tmp_path)
    package = os.path.dirname(rayloader.__file__)
    without = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(package, tmp_path / "rayloader", ignore=without)
    words = (directory, "--engine", "native", "--channel", channel)
    status, out, err = ended(started(census, *words, PYTHONPATH=str(tmp_path)))
    assert (status, out) == (2, "")
    assert err.startswith("rayloader: engine='native' needs the C extension")
    assert len(err.splitlines()) == 1
