"""Four ranks, several samples per file, subfolders, and batches that never reach the trainer."""

import pytest

from tests.dlio.truth import fingerprint, hold_opens, prefix

RANKS, EPOCHS, BATCH, SAMPLES_PER_FILE, FILES = 4, 2, 4, 3, 50
STEPS = 9
"""Of each rank: 150 samples divide neither by the ranks nor by the batches."""
RECORD = 4_000_000
MEMORY = 8 << 20
"""A rank's bound [bytes]: a batch of 4 records would not fit."""
EACH = [("train", epoch, rank) for epoch in range(1, EPOCHS + 1) for rank in range(RANKS)]
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def workload(dlio):
    dlio.files("train", FILES, "npz", subfolders=2)
    dlio.workload(
        dataset={"format": "npz", "num_files_train": FILES, "num_subfolders_train": 2,
                 "num_samples_per_file": SAMPLES_PER_FILE,
                 "record_length": RECORD, "record_length_bytes": RECORD},
        reader={"batch_size": BATCH, "read_threads": 1, "prefetch_size": 1,
                "file_shuffle": "random", "sample_shuffle": "off"},
        train={"epochs": EPOCHS, "seed_change_epoch": True},
    )  # fmt: skip
    return dlio


@pytest.fixture(scope="module")
def run(workload):
    finished = workload.run(RANKS, RAYLOADER_MEMORY_BYTES=str(MEMORY), RAYLOADER_DELIVER="false")
    assert finished.status == 0, finished.said[-6000:]
    return finished


def test_all_ranks_take_the_same_steps_and_the_run_ends(run):
    for _, epoch, rank in EACH:
        assert run.noted(rank, "end_train", epoch)["batches"] == STEPS
    assert sorted(run.receipts) == EACH
    assert run.gone_after is not None, run.left


def test_a_file_of_several_samples_is_read_once_per_rank_and_epoch(run):
    for key in EACH:
        record, wanted = run.receipts[key], prefix(run, *key, samples=STEPS * BATCH)
        expected = fingerprint(wanted)
        assert record["files_read"] == len(wanted) < STEPS * BATCH
        assert record["read_hash"] == record["assigned_hash"] == expected.content
        assert record["order_hash"] == expected.order
        assert record["bytes_transferred"] == sum(map(run.size, wanted))


def test_the_kernel_saw_these_files_opened_within_their_epochs_and_no_others(run):
    hold_opens(run, "train", EPOCHS, STEPS * BATCH)


def test_nothing_was_delivered_and_the_record_says_so(run):
    for record in run.receipts.values():
        assert record["deliver"] is False
        assert record["bytes_delivered"] == 0
        assert record["bytes_files"] == record["bytes_transferred"] > 0
        assert record["memory_bytes"] <= MEMORY


def test_a_batch_that_cannot_fit_is_refused_at_the_start_and_not_at_some_step(workload, run):
    refused = workload.run(1, RAYLOADER_MEMORY_BYTES=str(MEMORY))
    assert refused.status != 0
    assert "deliver=false" in refused.said
    assert "memory_bytes" in refused.said
    assert [note["event"] for note in refused.witness[0]] == ["assigned"]
    assert refused.opened("train") == []
    assert refused.gone_after is not None, refused.left
