"""Epochs that ``total_training_steps`` ends early, of files that DLIO lists or, unseen, reckons."""

import os

import pytest

from tests.dlio.harness import NEEDS, kind_of
from tests.dlio.truth import fingerprint, hold_opens, prefix

RANKS, EPOCHS, BATCH, FILES, SUBFOLDERS = 2, 3, 3, 40, 2
STEPS, ALL_STEPS = 2, 6
"""Of each rank: those wanted, and those that 20 files would give."""
EACH = [("train", epoch, rank) for epoch in range(1, EPOCHS + 1) for rank in range(RANKS)]
UNLISTED = {"skip_listing": True, "listing_validation_interval": 7}
pytestmark = pytest.mark.timeout(900)


def lists():
    """What a DLIO knows of its files beforehand, as keys of the section ``dataset``."""
    is_fork = kind_of(os.environ.get("RAYLOADER_DLIO")) == "fork"
    missing = pytest.mark.skipif(not is_fork, reason=f"skip_listing {NEEDS['fork']}")
    return [
        pytest.param({}, id="listed", marks=pytest.mark.slow),
        pytest.param(UNLISTED, id="unlisted", marks=missing),
    ]


@pytest.fixture(scope="module", params=lists())
def run(request, dlio):
    if not any((dlio.data / "train").iterdir()):
        dlio.files("train", FILES, "png", subfolders=SUBFOLDERS)
    dlio.workload(
        dataset={"format": "png", "num_files_train": FILES, "num_subfolders_train": SUBFOLDERS,
                 "record_length": 4000, "record_length_bytes": 4000, **request.param},
        reader={"batch_size": BATCH, "read_threads": 2, "prefetch_size": 4,
                "file_shuffle": "seed", "sample_shuffle": "off"},
        train={"epochs": EPOCHS, "seed_change_epoch": True, "total_training_steps": STEPS},
    )  # fmt: skip
    finished = dlio.run(RANKS)
    assert finished.status == 0, finished.said[-6000:]
    return finished


def test_every_epoch_ends_after_these_steps_on_every_rank(run):
    for key in EACH:
        assert run.noted(key[2], "end_train", key[1])["batches"] == STEPS
        assert run.receipts[key]["steps_yielded"] == run.receipts[key]["steps_expected"] == STEPS
    assert run.gone_after is not None, run.left


def test_only_the_files_of_these_steps_are_read_in_their_order(run):
    for key in EACH:
        record, wanted = run.receipts[key], prefix(run, *key, samples=STEPS * BATCH)
        expected = fingerprint(wanted)
        assert record["files_read"] == len(wanted) == STEPS * BATCH
        assert record["read_hash"] == record["assigned_hash"] == expected.content
        assert record["order_hash"] == expected.order
        assert record["bytes_transferred"] == sum(map(run.size, wanted))


def test_the_kernel_saw_no_others_opened(run):
    hold_opens(run, "train", EPOCHS, STEPS * BATCH)


def test_the_rest_is_counted_and_would_have_been_more_steps(run):
    for key in EACH:
        assigned = len(run.noted(key[2], "assigned", key[1])["train"])
        assert assigned // BATCH >= ALL_STEPS
        assert run.receipts[key]["files_assigned"] == assigned
        assert run.receipts[key]["files_remainder"] == assigned - STEPS * BATCH


def test_nothing_is_looked_up_before_the_clock(run):
    for record in run.receipts.values():
        assert record["bytes_before_clock"] == record["metadata_ops_before_clock"] == 0
