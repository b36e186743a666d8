"""Several nodes: ranks that see different files are told, and a node that is cut off is an error.

Two ranks with run ids of their own are what two nodes are under torchrun or MPI without a cluster:
each has a private Ray, and only torch.distributed connects them.
"""

import contextlib
import os
import socket
import sys
import time
from functools import partial

import pytest

from tests.hosts import Host, cable

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]
FILES = 12


@pytest.fixture
def directory(tmp_path):
    root = tmp_path / "a b\udcff"
    root.mkdir()
    for number in range(FILES):
        (root / f"{number:02}").write_bytes(os.urandom(1000))
    return str(root)


# Without a cluster

RANK = """
import sys, rayloader, torch.distributed
torch.distributed.init_process_group("gloo")
dataset = rayloader.RankDataset(sys.argv[1], batch_size=2)
def told(said):
    print(said, flush=True)
    sys.stdin.readline()
try:
    told("ready")
    with dataset:
        told("open")
        told(sum(map(len, dataset)))
except rayloader.CatalogMismatch as mismatch:
    told(mismatch)
"""


@pytest.mark.parametrize("differ", [False, True], ids=["same", "different"])
def test_ranks_of_nodes_without_a_cluster_compare_their_files(census, directory, differ):
    """Over the store of torch.distributed; the first to open waits for nobody."""
    first, second = two_nodes(census, directory)
    assert [first.line(50), second.line(50)] == ["ready", "ready"]
    first.tell()
    assert first.line(50) == "open"
    if differ:
        open(os.path.join(directory, "one more"), "w").close()
    second.tell()
    said = second.line(50)
    first.tell()
    if differ:
        assert said.startswith("rank 1 sees another catalog")
        assert first.line(30) == said
    else:
        second.tell()
        assert [said, first.line(30), second.line(30)] == ["open", "6", "6"]


def two_nodes(census, directory):
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = str(one.getsockname()[1])
    for rank in range(2):
        environ = {
            "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo",
            "RAYLOADER_RUN_ID": f"{census.mark}, node {rank}",
        }  # fmt: skip
        yield census.start(RANK, directory, **environ)


# A cluster whose network is cut

CUT_OFF = """
import os, signal, sys, time, rayloader

def opened(channel):
    return rayloader.RankDataset(
        sys.argv[1], rank=0, world_size=1, read_ahead_batches=1, ray=sys.argv[2], channel=channel,
        max_restarts=1, memory_bytes=16 << 20,
    ).open()

def outcome(act):
    began = time.monotonic()
    try:
        said = act()
    except rayloader.RayloaderError as error:
        said = f"{type(error).__name__}: {error}"
    print(f"{time.monotonic() - began:.1f} {said}".splitlines()[0], flush=True)

datasets = [opened("local"), opened("ray")]
iterators = [iter(dataset) for dataset in datasets]
held = [next(batches) for batches in iterators]
print(*[dataset.receipt.channel for dataset in datasets], flush=True)
sys.stdin.readline()
for batches in iterators:
    outcome(lambda: 1 + sum(1 for _ in batches))
outcome(lambda: sum(1 for _ in datasets[0]))
for dataset in datasets:
    os.kill(dataset.receipt.reader_pid, signal.SIGKILL)
    outcome(lambda: sum(1 for _ in dataset))
outcome(lambda: opened("local"))
"""


@pytest.fixture
def cluster_of_two(census):
    """A Ray of two hosts; (its address, the second host, what pulls the cable)."""
    with contextlib.ExitStack() as stack:
        one, two = hosts = [stack.enter_context(contextlib.closing(Host())) for _ in "ab"]
        cable(one, "eth0", two, "eth0")
        for host, address in zip(hosts, ADDRESSES, strict=True):
            host.plug("eth0", address)
        start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--disable-usage-stats"]
        head = ["--head", "--port=6399", "--include-dashboard=false", f"--temp-dir={census.tmp}/r"]
        joins = [head, [f"--address={ADDRESSES[0]}:6399"]]
        for host, address, join in zip(hosts, ADDRESSES, joins, strict=True):
            here = f"--node-ip-address={address}"
            host.run(*start, here, *SMALL, *join, env=census.environ(**SECRET))
        pull = partial(one.run, "ip", "link", "set", "eth0", "down")
        yield f"{ADDRESSES[0]}:6399", two, pull


ADDRESSES = ["10.231.78.1", "10.231.78.2"]
SMALL = ["--num-cpus=1", "--object-store-memory=80000000"]
SECRET = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make network namespaces")
@pytest.mark.timeout(150)
def test_a_node_that_is_cut_off_ends_its_epoch_and_then_says_so(census, directory, cluster_of_two):
    """Trainer and readers on one side, the GCS on the other."""
    address, host, pull = cluster_of_two
    # What Ray would end the trainer after, without a word: rayloader has it wait for ever.
    impatient = {
        "RAY_gcs_rpc_server_reconnect_timeout_s": "2",
        "RAY_grpc_client_keepalive_time_ms": "1000",
        "RAY_grpc_client_keepalive_timeout_ms": "1000",
    }
    trainer = census.start(CUT_OFF, directory, address, prefix=host.prefix, **SECRET, **impatient)
    assert trainer.line(50) == "local ray"
    pull()
    time.sleep(5)
    trainer.tell()
    outcomes = [trainer.line(40).partition(" ") for _ in range(6)]
    assert [said for *_, said in outcomes[:3]] == [str(FILES)] * 3
    for seconds, _, said in outcomes[3:]:
        assert f"no Ray answers at {address}" in said
        assert float(seconds) < 20
    assert [said.partition(":")[0] for *_, said in outcomes[3:]] == [
        "ReaderLost", "ReaderLost", "ClusterUnreachable",
    ]  # fmt: skip
    status, said = trainer.wait(30)
    assert status == 0, said
