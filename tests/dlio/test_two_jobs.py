"""Two jobs at once on one node: one on a slow storage and one CPU, one that loses a rank."""

import os
import shutil
import signal

import pytest

from tests import slow_mount
from tests.census import Census
from tests.dlio.harness import Dlio
from tests.dlio.truth import fingerprint, prefix

FILES, BATCH, STEPS, EPOCHS = 256, 32, 4, 2
LATENCY = 0.1
"""Of a read [s]."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def slow(dlio):
    """Where DLIO's files lead to: each read takes its time there."""
    if not slow_mount.available():
        pytest.skip("needs root and /dev/fuse")
    where = dlio.place / "mount"
    where.mkdir()
    mount = slow_mount.SlowMount(os.fsencode(where))
    mount.files = {f"{at:03}.png".encode(): os.urandom(1000 + at) for at in range(FILES)}
    mount.latency = LATENCY
    for name in map(os.fsdecode, mount.files):
        (dlio.data / "train" / name).symlink_to(where / name)
    dlio.workload(
        dataset={"format": "png", "num_files_train": FILES,
                 "record_length": 1000, "record_length_bytes": 1000},
        reader={"batch_size": BATCH, "read_threads": 2, "prefetch_size": 4,
                "file_shuffle": "off", "sample_shuffle": "off"},
        train={"epochs": EPOCHS},
    )  # fmt: skip
    yield dlio
    mount.close()


@pytest.fixture(scope="module")
def doomed(tmp_path_factory):
    census = Census()
    dlio = Dlio(tmp_path_factory.mktemp("doomed"), census)
    dlio.files("train", 64, "npy")
    dlio.workload(
        dataset={"format": "npy", "num_files_train": 64,
                 "record_length": 4000, "record_length_bytes": 4000},
        reader={"batch_size": 4, "read_threads": 1, "prefetch_size": 2},
        train={"epochs": 3, "computation_time": 0.5},
    )  # fmt: skip
    yield dlio
    census.close()


@pytest.fixture(scope="module")
def runs(slow, doomed):
    """(the job that ended well, the job that lost rank 1 by ``kill -9``)."""
    one_cpu = ["taskset", "-c", str(min(os.sched_getaffinity(0)))]
    with doomed.start(2) as dying, slow.start(2, prefix=one_cpu) as living:
        dying.until("end_train", 1)
        os.kill(dying.until("assigned", 1, rank=1)["pid"], signal.SIGKILL)
        lost = dying.wait()
        return living.wait(), lost


def test_the_other_job_does_not_notice(runs):
    living, _ = runs
    assert living.status == 0, living.said[-6000:]
    assert living.gone_after is not None, living.left
    for rank in (0, 1):
        for epoch in range(1, EPOCHS + 1):
            record = living.receipts["train", epoch, rank]
            expected = fingerprint(prefix(living, "train", epoch, rank, STEPS * BATCH))
            assert record["order_hash"] == expected.order


def test_a_killed_rank_ends_all_ranks_and_everything_within_ten_seconds(runs):
    _, lost = runs
    assert lost.status != 0
    assert lost.gone_after is not None, lost.left
    assert lost.gone_after < 10


def test_64_reads_are_in_flight_on_each_rank(runs):
    living, _ = runs
    for record in living.receipts.values():
        assert record["peak_in_flight"] == 64
        assert record["latency_p50"] > LATENCY / 2


def test_a_mask_of_one_cpu_is_one_warning_with_its_cure(runs):
    living, _ = runs
    warnings = [line for line in living.said.splitlines() if "--bind-to none" in line]
    assert len(warnings) == 1
    assert {tuple(record["affinity"]) for record in living.receipts.values()} == {
        (min(os.sched_getaffinity(0)),)
    }


def test_the_next_run_works_at_once(runs, doomed):
    again = doomed.run(1, overrides=["++workload.train.computation_time=0.001"])
    assert again.status == 0, again.said[-6000:]
    assert len(again.receipts) == 3
    assert again.gone_after is not None, again.left


def test_a_rank_that_cannot_read_ends_all_ranks_with_its_error(runs, doomed):
    (victim, *_) = sorted((doomed.data / "train").iterdir())[5:]
    victim.unlink()
    victim.mkdir()
    try:
        failed = doomed.run(2, overrides=["++workload.train.computation_time=0.001"])
    finally:
        shutil.rmtree(victim)
    assert failed.status != 0
    assert f"{victim}" in failed.said
    assert "not a regular file" in failed.said
    assert "ends all 2 ranks" in failed.said
    assert failed.gone_after is not None, failed.left
