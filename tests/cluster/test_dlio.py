"""DLIO under ``mpirun``, a rank on each host, with its readers in the Ray that ``ray up`` made."""

import pytest

from tests.cluster.conftest import hosts_of_ray
from tests.dlio.harness import Dlio
from tests.dlio.truth import fingerprint, prefix
from tests.hosts import HOME, PATH

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
FILES, BATCH, EPOCHS = 64, 4, 2
EACH = [("train", epoch, rank) for epoch in range(1, EPOCHS + 1) for rank in (0, 1)]
PASSED_ON = (
    "PYTHONPATH", "RAYLOADER_RAY", "DLIO_WITNESS", "TEST_CENSUS", "HYDRA_FULL_ERROR",
    "TF_CPP_MIN_LOG_LEVEL", "MPLCONFIGDIR",
)  # fmt: skip
"""Variables that Open MPI is to have on the other host too."""


@pytest.fixture(scope="module")
def run(cluster, shared, module_census):
    """(how it ended, what ran on each host in its second epoch)."""
    dlio = Dlio(shared / "dlio", module_census)
    dlio.files("train", FILES, "npy")
    dlio.workload(
        dataset={"format": "npy", "num_files_train": FILES,
                 "record_length": 4000, "record_length_bytes": 4000},
        reader={"batch_size": BATCH, "read_threads": 2, "prefetch_size": 2,
                "data_loader_sampler": "index"},
        train={"epochs": EPOCHS, "computation_time": 0.1},
    )  # fmt: skip
    hosts = ",".join(f"{host.address}:1" for host in cluster.hosts)
    mpirun = ["--host", hosts, "--bind-to", "none"]
    for name in PASSED_ON:
        mpirun += ["-x", name]
    with dlio.start(
        2, prefix=cluster.one.prefix, mpirun=mpirun,
        RAYLOADER_RAY="cluster", HOME=HOME, TMPDIR="/tmp", PATH=PATH,
    ) as running:  # fmt: skip
        running.until("start_train", EPOCHS)
        meanwhile = [host.processes() for host in cluster.hosts]
        finished = running.wait()
    assert finished.status == 0, finished.said[-6000:]
    return finished, meanwhile


def test_each_rank_reads_its_files_on_its_host(run):
    finished, _ = run
    assert sorted(finished.receipts) == EACH
    for key in EACH:
        record = finished.receipts[key]
        assert record["host"] == ("one", "two")[key[2]]
        assigned = prefix(finished, *key, samples=FILES // 2)
        assert record["read_hash"] == fingerprint(assigned).content
        assert record["files_read"] == FILES // 2
        assert record["channel"] == "local"
    for epoch in range(1, EPOCHS + 1):
        shares = [set(prefix(finished, "train", epoch, rank, FILES // 2)) for rank in (0, 1)]
        assert len(shares[0] | shares[1]) == FILES


def test_the_readers_are_in_the_cluster_and_no_other_ray_is_started(run):
    finished, meanwhile = run
    assert "ray=cluster (RAYLOADER_RAY)" in finished.said
    for processes in meanwhile:
        assert len([line for line in processes if "ray::ReaderActor" in line]) == 1
        assert len([line for line in processes if "/raylet " in line]) == 1


def test_the_cluster_stays_and_nothing_else(run, cluster):
    finished, _ = run
    assert finished.gone_after is not None, finished.left
    assert len(hosts_of_ray(cluster)) == 2
    for host in cluster.hosts:
        assert [line for line in host.processes() if "ReaderActor" in line] == []
