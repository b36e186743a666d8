"""Several nodes: ranks that see different files are told, and a node that is cut off is an error.

Two ranks with run ids of their own are what two nodes are under torchrun or MPI without a cluster:
each has a private Ray, and only torch.distributed connects them.
"""

import os
import socket

import pytest

from tests.census import Census

pytestmark = pytest.mark.timeout(60)
FILES = 12


@pytest.fixture
def census():
    one = Census()
    yield one
    one.close()


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
