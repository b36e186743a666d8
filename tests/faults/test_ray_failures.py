"""When Ray fails: the epoch goes on or says why. Never a hang, never a silent end."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

import rayloader
from rayloader import cluster, errors
from tests.faults import two_runs

pytestmark = pytest.mark.timeout(60)
FILES = 40

RANK = """
import logging, os, sys, rayloader
logging.basicConfig(level=logging.ERROR)
with rayloader.RankDataset(sys.argv[1], batch_size=1, read_ahead_batches=2) as dataset:
    print("open", dataset.rank, dataset.world_size, flush=True)
    for epoch in range(9):
        order = []
        dataset.set_epoch(0)
        command = sys.stdin.readline().split()
        if command == ["end"]:
            break
        if command == ["fail"]:
            raise KeyError("the training loop's own error")
        for step, batch in enumerate(dataset):
            order += batch.keys
            if step == 3 and command == ["pause"]:
                print("paused", flush=True)
                sys.stdin.readline()
        print(hash(tuple(order)), len(order), dataset.receipt.restarts, flush=True)
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    for number in range(FILES):
        (root / f"{number:03}").write_bytes(os.urandom(1000))
    return str(root)


def a_rank(census, directory, run="", rank=0, world_size=1, prefix=(), **environ):
    """One rank as its launcher starts it, open; it prints hash, length and restarts per line."""
    if run:
        environ |= {
            "RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(world_size), "TORCHELASTIC_RUN_ID": run,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511",
        }  # fmt: skip
    return census.start(RANK, directory, prefix=prefix, PYTHONHASHSEED="0", **environ)


def epoch(rank):
    rank.tell()
    return rank.line(30)


def epoch_during(rank, fault):
    rank.tell("pause")
    assert rank.line(30) == "paused"
    fault()
    rank.tell()
    return rank.line(40).rsplit(" ", 1)


def kill(census, part):
    os.kill(census.pid_of(part), signal.SIGKILL)
    time.sleep(0.3)


# Mid-epoch


def test_an_epoch_outlives_all_that_is_rays_and_then_an_error_is_still_told(census, directory):
    rank = a_rank(census, directory)
    assert rank.line(40) == "open 0 1"
    whole, restarts = epoch(rank).rsplit(" ", 1)
    assert restarts == "0"
    # With the raylet dies the reader: another Ray is started, nothing is lost.
    assert epoch_during(rank, lambda: kill(census, "/raylet/raylet")) == [whole, "1"]
    part = "rayloader.guardian rayloader/"
    assert epoch_during(rank, lambda: kill(census, part)) == [whole, "1"]
    # Without the GCS the reader goes on.
    assert epoch_during(rank, lambda: kill(census, "/gcs/gcs_server")) == [whole, "0"]
    assert epoch(rank) == f"{whole} 0"
    # Ray would tell the GCS of an uncaught error first, and wait for it.
    began = time.monotonic()
    rank.tell("fail")
    status, said = rank.wait(20)
    assert status == 1
    assert said.splitlines()[-1] == 'KeyError: "the training loop\'s own error"'
    assert time.monotonic() - began < 15
    census.gone(10)


SILENT = """
import os, signal, sys, time, rayloader
with rayloader.RankDataset(
    sys.argv[1], rank=0, world_size=1, read_ahead_batches=1, max_restarts=1
) as dataset:
    batches = iter(dataset)
    held = next(batches)
    print("paused", flush=True)
    sys.stdin.readline()
    os.kill(dataset.receipt.reader_pid, signal.SIGKILL)
    began = time.monotonic()
    try:
        list(batches)
    except rayloader.ReaderLost as lost:
        print(f"{time.monotonic() - began:.1f}", lost, flush=True)
"""


def test_a_gcs_that_does_not_answer_while_a_reader_must_be_replaced_is_an_error(census, directory):
    """Ray's own calls would wait for it for ever."""
    trainer = census.start(SILENT, directory)
    assert trainer.line(40) == "paused"
    gcs = census.pid_of("/gcs/gcs_server")
    os.kill(gcs, signal.SIGSTOP)
    trainer.tell()
    seconds, _, said = trainer.line(40).partition(" ")
    assert "no Ray answers at 127.0.0.1:" in said
    assert float(seconds) < 20
    assert trainer.wait(20)[0] == 0, trainer.wait()[1]
    census.gone(10)


def test_a_ray_that_dies_while_a_reader_is_being_replaced_is_replaced_too(census, directory):
    rank = a_rank(census, directory)
    assert rank.line(40) == "open 0 1"
    whole = epoch(rank).rsplit(" ", 1)[0]
    gcs = census.pid_of("/gcs/gcs_server")
    later = threading.Timer(2.0, os.kill, (gcs, signal.SIGKILL))

    def fault():
        os.kill(gcs, signal.SIGSTOP)
        kill(census, "ray::ReaderActor")
        later.start()

    order, restarts = epoch_during(rank, fault)
    later.join()
    assert order == whole
    assert restarts in ("1", "2")
    rank.tell("end")
    assert rank.wait(30) == (0, "")
    census.gone(10)


# Several at once


def test_a_starter_that_dies_disturbs_neither_its_run_nor_another(census, directory):
    starter = a_rank(census, directory, "one", 0, 2)
    stranger = a_rank(census, directory, "two")
    assert starter.line(50) == "open 0 2"
    other = a_rank(census, directory, "one", 1, 2)
    assert stranger.line(50) == "open 0 1"
    assert other.line(50) == "open 1 2"
    assert sum("/gcs/gcs_server" in line for line in census.processes().values()) == 2
    shares = [epoch(rank).split()[1:] for rank in (starter, other, stranger)]
    assert shares == [["20", "0"], ["20", "0"], ["40", "0"]]
    assert epoch_during(other, starter.kill)[1] == "0"
    assert epoch(other).split()[1:] == ["20", "0"]
    stranger.tell("end")
    assert stranger.wait(20) == (0, "")
    assert epoch(other).split()[1:] == ["20", "0"]
    other.tell("end")
    assert other.wait(20) == (0, "")
    census.gone(10)


@pytest.mark.timeout(150)
def test_two_runs_at_once_do_not_notice_each_other(tmp_path):
    """Twice; ``python -m tests.faults.two_runs`` does it twenty times."""
    two_runs.make_files(tmp_path)
    for _ in range(2):
        two_runs.once(tmp_path)


TORCHRUN = """
import sys, rayloader
from rayloader import cluster
with rayloader.RankDataset(sys.argv[1], batch_size=2) as dataset:
    read = sum(len(batch) for batch in dataset)
    sys.stdout.write(f"{dataset.rank} {read} {cluster._state.connection.address}\\n")
    sys.stdout.flush()
"""


def test_four_ranks_of_torchrun_share_one_ray(census, directory, tmp_path):
    (tmp_path / "train.py").write_text(TORCHRUN)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4",
        "--log-dir", str(tmp_path / "logs"), str(tmp_path / "train.py"), directory,
    ]  # fmt: skip
    ran = subprocess.run(command, env=census.environ(), capture_output=True, text=True, timeout=55)
    assert ran.returncode == 0, ran.stderr
    lines = sorted(line.split() for line in ran.stdout.splitlines())
    assert [line[:2] for line in lines] == [[str(rank), "10"] for rank in range(4)]
    assert len({address for *_, address in lines}) == 1
    census.gone(10)


# Ray elsewhere


def unused_address():
    with socket.create_server(("127.0.0.1", 0)) as one:
        return f"127.0.0.1:{one.getsockname()[1]}"


def test_a_dead_address_is_refused_within_seconds(directory):
    cluster.shutdown()
    address = unused_address()
    began = time.monotonic()
    with pytest.raises(errors.ClusterUnreachable, match=f"no Ray answers at {address}"):
        rayloader.RankDataset(directory, rank=0, world_size=1, ray=address).open()
    assert time.monotonic() - began < 5


def test_the_session_of_an_earlier_run_is_not_joined(directory, tmp_path, monkeypatch):
    cluster.shutdown()
    address = unused_address()
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text(address)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    began = time.monotonic()
    with pytest.raises(errors.ClusterUnreachable, match=f"no Ray answers at {address}"):
        rayloader.RankDataset(directory, rank=0, world_size=1, ray="cluster").open()
    assert time.monotonic() - began < 5
    with rayloader.RankDataset(directory, rank=0, world_size=1) as dataset:
        assert sum(map(len, dataset)) == FILES
        assert cluster.connect().address != address
    cluster.shutdown()


# No room in Ray

FULL = """
import sys, rayloader
with rayloader.RankDataset(sys.argv[1], rank=0, world_size=1, channel="ray") as dataset:
    kept = [batch for batch in dataset]
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")
def test_a_full_object_store_on_a_full_disk_is_one_error(census, tmp_path):
    for number in range(4):
        with open(tmp_path / str(number), "wb") as file:
            file.truncate(60 << 20)
    mounts = (
        f"mount -t tmpfs -o size=60m none {census.tmp} && "
        'mount -t tmpfs -o size=90m none /dev/shm && exec "$@"'
    )
    prefix = ["unshare", "--mount", "bash", "-c", mounts, "-"]
    status, said = census.start(FULL, str(tmp_path), prefix=prefix).wait(50)
    assert status == 1
    # Ray's logger may find the disk full in the same moment, and says so by itself.
    ours = [line for line in said.splitlines() if not line.startswith("[*** LOG ERROR")]
    assert ours[-1].startswith(
        "rayloader.errors.ChannelError: Ray's object store has no room for a batch"
    )
    assert "ray.exceptions" not in said
    census.gone(10)
