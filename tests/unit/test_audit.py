"""What receipts of a DLIO run claim is recomputed, and what they cannot show is said."""

import json
import sys

import pytest

from rayloader import cli
from rayloader.errors import ReceiptError
from rayloader.experiment.audit import audit

RECORD = {
    "format": 1, "run": "r", "world_size": 2, "part": "train", "steps_expected": 5,
    "steps_yielded": 5, "files_assigned": 11, "files_read": 10, "files_remainder": 1,
    "assigned_hash": "0a", "read_hash": "0a", "assigned_order_hash": "0b", "order_hash": "0b",
    "share_hash": "0c", "dataset_hash": "0c", "dataset_files": 11, "bytes_nominal": 1000,
    "bytes_files": 1000, "bytes_transferred": 1000, "bytes_before_clock": 0,
    "metadata_ops_before_clock": 0, "reader_pid": 7, "restarts": 0, "retries": 0, "skipped": [],
    "device_bytes": None, "device_bytes_why": "nfs has no block device of its own",
    "resident_bytes_before": 5, "deliver": True, "read_ahead_batches_max": 2, "storage": "file",
}  # fmt: skip


@pytest.fixture
def written(tmp_path):
    """Writes receipts of two ranks and two epochs; ``changes``: of (rank, epoch)."""

    def write(changes=None, drop=()):
        for rank in range(2):
            with open(tmp_path / f"rayloader_receipts_{rank}.jsonl", "w") as file:
                for epoch in (1, 2):
                    if (rank, epoch) not in drop:
                        record = {**RECORD, "rank": rank, "epoch": epoch}
                        record |= (changes or {}).get((rank, epoch), {})
                        file.write(json.dumps(record) + "\n")
        return str(tmp_path)

    return write


def failing(folder):
    return [finding.claim for finding in audit(folder).findings if not finding.holds]


def test_a_run_that_is_as_it_should_be_holds(written):
    found = audit(written())
    assert found.holds
    assert (found.ranks, found.epochs, found.records) == (2, 2, 4)
    assert any("nfs has no block device" in unknown for unknown in found.unknown)


@pytest.mark.parametrize(
    ("change", "claim"),
    [
        ({"steps_yielded": 4}, "same steps"),
        ({"files_read": 9}, "what DLIO assigned"),
        ({"read_hash": "0f"}, "what DLIO assigned"),
        ({"order_hash": "0f"}, "in its order"),
        ({"share_hash": "0f"}, "disjoint and complete"),
        ({"dataset_files": 12}, "disjoint and complete"),
        ({"bytes_before_clock": 1}, "before the clock"),
        ({"metadata_ops_before_clock": 1}, "before the clock"),
        ({"bytes_transferred": 2000}, "its files once"),
        ({"bytes_nominal": 1011}, "within 1 %"),
        ({"reader_pid": 8}, "one reader process"),
        ({"restarts": 1}, "one reader process"),
        ({"skipped": [{"key": "a", "cause": "b"}]}, "left out"),
    ],
)
def test_each_claim_fails_where_a_record_contradicts_it(written, change, claim):
    (only,) = failing(written({(1, 2): change}))
    assert claim in only


def test_a_rank_that_lacks_an_epoch_is_missed(written):
    claims = failing(written(drop={(1, 2)}))
    assert "every rank has a record of every epoch" in claims


def test_repeated_requests_explain_bytes_that_came_twice(written):
    assert audit(written({(0, 1): {"bytes_transferred": 1500, "retries": 2}})).holds


def test_half_a_line_of_a_run_that_was_killed_is_no_record(written):
    folder = written()
    with open(f"{folder}/rayloader_receipts_0.jsonl", "a") as file:
        file.write('{"format": 1, "ru')
    assert audit(folder).holds


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("not json", "no record"),
        ("[]", "missing"),
        ('{"format": 1}', "run, rank.* missing"),
        (json.dumps({**RECORD, "rank": 0, "epoch": 1, "format": 9}), "format 9"),
        (json.dumps({**RECORD, "rank": 0, "epoch": 1, "run": "other"}), "more than one run"),
    ],
)
def test_what_is_no_record_is_an_error_that_names_file_and_line(written, line, why):
    folder = written()
    with open(f"{folder}/rayloader_receipts_0.jsonl", "a") as file:
        file.write(line + "\n")
    with pytest.raises(ReceiptError, match=why):
        audit(folder)


def test_a_folder_without_receipts_is_an_error(tmp_path):
    with pytest.raises(ReceiptError, match="no receipts here"):
        audit(str(tmp_path))


@pytest.mark.parametrize(("changes", "status"), [({}, 0), ({(0, 1): {"files_read": 1}}, 1)])
def test_the_command_shows_it_and_its_status_says_whether_all_holds(
    written, changes, status, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", ["rayloader", "receipt", "check", written(changes)])
    assert cli._run() == status
    told = capsys.readouterr().out
    assert told.startswith("4 receipts: 2 ranks, 2 epochs of training\n")
    assert ("FAILS " in told) == bool(status)
    assert "cannot be known from receipts:" in told


def test_the_command_refuses_a_folder_without_receipts(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["rayloader", "receipt", "check", str(tmp_path)])
    assert cli._run() == 2
    assert "no receipts here" in capsys.readouterr().err
