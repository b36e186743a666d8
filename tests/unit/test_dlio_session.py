"""One reader for all that DLIO reads in a run, and a record of each epoch. Needs no DLIO."""

import dataclasses
import json
import os
import time

import pytest
from rayloader_dlio import records
from rayloader_dlio.epoch import Epoch
from rayloader_dlio.session import session

from rayloader import OptionError, errors
from rayloader.experiment.audit import audit
from tests.unit.dlio_arguments import arguments, dealt
from tests.unit.dlio_mpi import World

SIZE = 4000
TRAIN, VALID = 21, 7


@dataclasses.dataclass
class Run:
    """A DLIO run of one rank, as far as the adapter sees it."""

    args: object
    folder: str

    def __post_init__(self):
        self.reported = []
        self.session = session(self.args, World().mpi())

    def epoch(self, train=True, steps=None):
        """Read an epoch, or so many steps of it, as DLIO's loop does."""
        reading = Epoch(self.session, train, "item", self.reported.extend)
        items = reading.batches()
        for _, item in zip(range(steps or 10**6), items, strict=False):
            assert item == "item"
        del items
        reading.account()
        return reading

    def records(self):
        """What has been written so far."""
        written = self.session._written
        if written is not None:
            written.result()
        with open(os.path.join(self.folder, "rayloader_receipts_0.jsonl")) as file:
            return [json.loads(line) for line in file]


def files_in(directory, count):
    directory.mkdir(parents=True)
    paths = [str(directory / f"img_{number:02}") for number in range(count)]
    for path in paths:
        with open(path, "wb") as file:
            file.write(os.urandom(SIZE))
    return paths


def a_run(tmp_path, **changes):
    train = files_in(tmp_path / "data" / "train", TRAIN)
    valid = files_in(tmp_path / "data" / "valid", VALID)
    args = arguments(**{
        "data_folder": str(tmp_path / "data"),
        "output_folder": str(tmp_path / "out"),
        "record_length": SIZE,
        "batch_size": 4,
        "batch_size_eval": 3,
        "read_threads": 2,
        "do_eval": True,
        "num_files_train": TRAIN,
        "num_files_eval": VALID,
        "file_list_train": train,
        "file_list_eval": valid,
        "train_file_map": dealt(train, 2, TRAIN // 2),
        "val_file_map": dealt(valid, 2, VALID // 2),
        "metric_exclude_start_steps": 1,
        **changes,
    })  # fmt: skip
    return Run(args, str(tmp_path / "out"))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    it = a_run(tmp_path_factory.mktemp("dlio"), epochs=100)
    yield it
    it.session.close()


def test_training_and_validation_are_read_by_one_process_epoch_after_epoch(run):
    for _ in range(3):
        assert run.epoch().steps_yielded == TRAIN // 4
        assert run.epoch(train=False).steps_yielded == VALID // 3
    found = run.records()[-6:]
    assert len({record["reader_pid"] for record in found}) == 1
    assert [record["part"] for record in found] == ["train", "valid"] * 3
    assert [found[0]["epoch"] + number for number in range(3)] == [
        record["epoch"] for record in found[::2]
    ]
    assert len({record["reading"] for record in found}) == 6


def test_what_is_assigned_is_read_in_order_and_the_rest_is_counted(run):
    run.epoch()
    record = run.records()[-1]
    assert (record["files_assigned"], record["files_read"], record["files_remainder"]) == (
        21,
        20,
        1,
    )
    assert record["read_hash"] == record["assigned_hash"]
    assert record["order_hash"] == record["assigned_order_hash"]
    assert (
        record["bytes_nominal"] == record["bytes_files"] == record["bytes_delivered"] == 20 * SIZE
    )
    assert record["bytes_in_excluded_steps"] >= 4 * SIZE


def test_a_new_list_is_read_in_the_next_epoch(run):
    before = run.args.train_file_map
    run.epoch()
    run.args.train_file_map = dealt(run.args.file_list_train[::-1], 2, TRAIN // 2)
    run.epoch()
    run.args.train_file_map = before
    first, second = run.records()[-2:]
    assert second["read_hash"] == second["assigned_hash"] != first["read_hash"]
    assert second["share_hash"] == first["share_hash"]


def test_nothing_is_read_before_the_first_batch_is_asked_for(run):
    before = len(run.records())
    reading = Epoch(run.session, True, "item", run.reported.extend)
    items = reading.batches()
    time.sleep(0.1)
    assert reading.measure is None
    del items
    reading.account()
    assert len(run.records()) == before
    run.epoch()
    record = run.records()[-1]
    assert (record["bytes_before_clock"], record["metadata_ops_before_clock"]) == (0, 0)


def test_a_loop_that_stops_at_its_last_step_leaves_a_complete_record(run):
    """DLIO 2.0 asks for no more after the last step."""
    run.epoch(steps=TRAIN // 4)
    record = run.records()[-1]
    assert record["steps_yielded"] == record["steps_expected"] == TRAIN // 4
    assert record["files_read"] == 20


def test_a_loop_that_stops_early_is_seen_in_the_record_and_the_next_epoch_is_whole(run):
    run.epoch(steps=2)
    assert run.records()[-1]["steps_yielded"] == 2
    run.epoch()
    record = run.records()[-1]
    assert record["steps_yielded"] == TRAIN // 4
    assert record["read_hash"] == record["assigned_hash"]


def test_every_file_is_reported_to_dlios_tracer(run):
    run.reported.clear()
    run.epoch()
    assert run.reported == [SIZE] * 20


def test_the_gap_is_told_apart(run):
    run.epoch()
    time.sleep(0.2)
    run.epoch()
    record = run.records()[-1]
    assert 0.19 < record["gap_dlio_s"] < 1.0
    assert 0 < record["gap_ours_s"] < record["gap_dlio_s"] + 5


def test_the_record_says_what_the_kernel_knows(run):
    run.epoch()
    record = run.records()[-1]
    assert record["fs_type"]
    assert (record["device_bytes"] is None) != (record["device_bytes_why"] is None)
    assert record["cpu_reader"] > 0
    assert record["cpu_ray"] >= 0
    assert record["affinity"] == sorted(os.sched_getaffinity(0))
    assert record["node_in_flight_ceiling"] == 64
    assert record["read_ahead_batches_max"] == 2
    assert record["wall_s"] >= record["seconds"] > 0
    assert record["versions"]["rayloader"]


def test_a_session_refuses_at_its_start_what_it_cannot_read(tmp_path, run):
    with pytest.raises(OptionError, match="tfrecord"):
        a_run(tmp_path, format="tfrecord")


def test_the_claims_of_a_whole_run_hold_and_a_second_run_begins_anew(tmp_path, capsys):
    it = a_run(tmp_path, read_threads=0, do_eval=False)
    try:
        told = capsys.readouterr().out
        assert told.startswith("rayloader 0")
        assert "5 steps of 4 samples" in told
        assert "read-ahead 0 batches" in told
        for _ in range(2):
            it.epoch()
        assert len(it.records()) == 2
    finally:
        it.session.close()
    found = audit(it.folder)
    assert found.holds, found.findings
    assert (found.ranks, found.epochs, found.records) == (1, 2, 2)


def test_the_claims_of_epochs_without_a_step_hold_too(tmp_path):
    """As where DLIO 3 trims the files to none."""
    it = a_run(tmp_path, batch_size=TRAIN + 1, do_eval=False)
    try:
        for _ in range(2):
            it.epoch()
        for record in it.records():
            assert (record["rank"], record["world_size"], record["files_read"]) == (0, 1, 0)
            assert record["read_hash"] == record["assigned_hash"]
            assert record["files_remainder"] == TRAIN
    finally:
        it.session.close()
    found = audit(it.folder)
    assert found.holds, found.findings


def test_a_batch_that_might_not_fit_is_refused_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYLOADER_MEMORY_BYTES", "1M")
    with pytest.raises(OptionError, match=r"a batch can take .*deliver=false"):
        a_run(tmp_path, record_length=400_000)


def test_a_file_that_is_gone_ends_the_epoch_with_its_name(tmp_path):
    it = a_run(tmp_path)
    try:
        os.unlink(it.args.file_list_train[9])
        with pytest.raises(errors.ObjectNotFound, match="img_09") as raised:
            it.epoch()
        assert "training, DLIO's epoch 1, step 3" in raised.value.__notes__
    finally:
        it.session.close()


def test_the_environment_is_told_without_secrets():
    shown = records.environment({
        "RAYLOADER_CONCURRENCY": "8",
        "RAYLOADER_RUN_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_ENDPOINT_URL": "http://user:pass@store:9000/path",
        "S3DLIO_TOKEN": "x",
        "HOME": "/root",
    })  # fmt: skip
    assert shown == {
        "RAYLOADER_CONCURRENCY": "8",
        "AWS_ENDPOINT_URL": "http://store:9000/path",
    }
