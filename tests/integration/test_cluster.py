"""A private Ray that starts quickly, tells nobody its secret and never outlives its run."""

import contextlib
import dataclasses
import logging
import os
import signal
import socket
import threading
import time

import pytest

from rayloader import cluster
from rayloader.errors import ClusterUnreachable, OptionError, PlacementFailed, UsageError
from tests.census import Census, read

DRIVER = """
import os, sys, time
from rayloader import cluster
began = time.monotonic()
connection = cluster.connect(sys.argv[1], run_id=sys.argv[2] if len(sys.argv) > 2 else None)
import ray
@ray.remote
class Reader:
    def cpus(self):
        return sorted(os.sched_getaffinity(0))
reader = Reader.options(**cluster.place_reader(connection)).remote()
ray.get(reader.cpus.remote())
print(connection.address, time.monotonic() - began, flush=True)
for line in sys.stdin:
    try:
        print("said", eval(line), flush=True)
    except Exception as error:
        print(type(error).__name__, str(error).splitlines()[0], flush=True)
"""
CALL = "ray.get(reader.cpus.remote(), timeout=5)"
NODES_CPUS = f"said {sorted(os.sched_getaffinity(0))}"


# Addresses


@pytest.fixture
def apart():
    """This process, joined to nothing."""
    cluster.shutdown()


@pytest.fixture
def listener(apart):
    with socket.create_server(("127.0.0.1", 0)) as one:
        yield one, f"127.0.0.1:{one.getsockname()[1]}"


def test_a_dead_address_is_refused_at_once(listener):
    one, address = listener
    one.close()
    began = time.monotonic()
    with pytest.raises(ClusterUnreachable, match=f"no Ray answers at {address}: .*refused"):
        cluster.connect(address)
    assert time.monotonic() - began < 1


def test_a_mute_service_is_refused_within_seconds(listener):
    _, address = listener
    began = time.monotonic()
    with pytest.raises(ClusterUnreachable, match=f"no Ray answers at {address}: no answer"):
        cluster.connect(address)
    assert time.monotonic() - began < 5


def test_a_web_server_is_no_ray(listener):
    one, address = listener

    def answer():
        connection, _ = one.accept()
        with connection:
            connection.recv(99)
            connection.sendall(b"HTTP/1.1 505 What\r\n\r\n")

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(ClusterUnreachable, match=f"listens at {address} is no Ray"):
        cluster.connect(address)
    thread.join(5)


@pytest.mark.parametrize(
    ("choice", "why"),
    [
        ("ray://127.0.0.1:10001", "Ray Client cannot be used"),
        ("everywhere", "must be 'auto'"),
        ("127.0.0.1:0", "must be 'auto'"),
        ("127.0.0.1:65536", "must be 'auto'"),
        (":6379", "must be 'auto'"),
    ],
)
def test_what_is_no_address_is_an_option_error(apart, choice, why):
    with pytest.raises(OptionError, match=why):
        cluster.connect(choice)


def test_a_wrong_ray_address_names_the_variable(apart, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(OptionError, match=r"RAY_ADDRESS='ray://head:10001'"):
        cluster.connect("cluster")


def test_no_cluster_here_says_how_to_start_one(apart, monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ClusterUnreachable, match="ray start --head"):
        cluster.connect("cluster")


@pytest.fixture(scope="module")
def here():
    """This very process, joined to a private Ray; and how it was before."""
    import ray  # so that what importing it does is not counted

    signal.signal(signal.SIGTERM, lambda *_: terminated.append(True))
    terminated = []
    before = {
        "environ": {name: it for name, it in os.environ.items() if name.startswith("RAY")},
        "log": _logging(),
        "terminated": terminated,
    }
    began = time.monotonic()
    connection = cluster.connect("private", start_timeout=40)
    before["seconds"] = time.monotonic() - began
    yield connection, before
    cluster.shutdown()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert not ray.is_initialized()


def _logging():
    log = logging.getLogger("ray")
    ours = [one for one in log.handlers if not type(one).__module__.startswith("_pytest")]
    return log.level, log.propagate, ours, logging.getLogger().level


# Joined from this process


def test_joining_again_from_any_thread_is_the_same_connection(here):
    connection, _ = here
    found = []
    threads = [
        threading.Thread(target=lambda choice=choice: found.append(cluster.connect(choice)))
        for choice in ("private", "auto", "auto", connection.address)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert found == [connection] * 4
    assert connection.private
    assert connection.joined
    assert connection.same_node


def test_a_reader_is_placed_on_this_node(here):
    import ray

    connection, _ = here

    @ray.remote
    class Reader:
        def node(self):
            return ray.get_runtime_context().get_node_id(), os.getppid()

    reader = Reader.options(**cluster.place_reader(connection)).remote()
    node_id, parent = ray.get(reader.node.remote(), timeout=20)
    ray.kill(reader)
    assert node_id == connection.node_id
    assert parent in _family(cluster.guardian().pid)


def test_a_reader_on_an_unknown_node_is_a_placement_error(here):
    import ray

    connection, _ = here

    @ray.remote
    class Reader:
        def ready(self):
            return True

    elsewhere = dataclasses.replace(connection, node_id="ab" * 28)
    reader = Reader.options(**cluster.place_reader(elsewhere)).remote()
    with pytest.raises(ray.exceptions.RayError) as raised:
        ray.get(reader.ready.remote(), timeout=20)
    assert isinstance(cluster.cluster_error(raised.value), PlacementFailed)


def test_joining_leaves_the_process_as_it_was(here):
    _, before = here
    assert {name: it for name, it in os.environ.items() if name.startswith("RAY")} == before[
        "environ"
    ]
    assert _logging() == before["log"]
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.05)
    assert before["terminated"]


def test_the_secret_is_in_no_command_line_and_in_no_file(here):
    token = cluster.guardian().ray(5).token
    assert len(token) == 64
    assert token not in repr(cluster.guardian().ray(5))
    family = _family(cluster.guardian().pid)
    assert len(family) >= 6
    for pid in family:
        assert token.encode() not in read(f"/proc/{pid}/cmdline")
    for directory in (os.path.expanduser("~/.ray"), _directory(family)):
        for folder, _, files in os.walk(directory):
            for path in (os.path.join(folder, name) for name in files):
                assert not os.path.isfile(path) or token.encode() not in read(path)


def test_every_port_is_on_loopback(here):
    connection, _ = here
    ports = _ports(_family(cluster.guardian().pid))
    assert int(connection.address.rpartition(":")[2]) in {port for _, port in ports}
    assert {host for host, _ in ports} == {"127.0.0.1"}


def test_the_processes_stay_the_same(here):
    import ray

    deadline = time.monotonic() + 10
    while _workers(_family(cluster.guardian().pid)):
        assert time.monotonic() < deadline, "readers of earlier tests, killed, are still there"
        time.sleep(0.05)
    before = _family(cluster.guardian().pid)

    @ray.remote(num_cpus=0)
    def idle():
        return os.getpid()

    ray.get(idle.remote(), timeout=20)
    with_worker = _family(cluster.guardian().pid)
    assert len(with_worker - before) == 1
    time.sleep(2.5)
    assert _family(cluster.guardian().pid) == with_worker


def test_a_second_ray_cannot_be_joined_meanwhile(here):
    with pytest.raises(UsageError, match="already joined the Ray at"):
        cluster.connect("10.0.0.1:6379")


def test_a_forked_child_is_told_so(here):
    child = os.fork()
    if child == 0:
        try:
            cluster.connect()
        except UsageError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_it_is_up_within_four_seconds_on_an_idle_machine(here):
    _, before = here
    assert before["seconds"] < 4 * max(1.0, os.getloadavg()[0] / os.cpu_count())


def _family(pid):
    """A process and all its descendants."""
    parents = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            parents[int(entry)] = int(read(f"/proc/{entry}/stat").rpartition(b")")[2].split()[1])
    family = {pid}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return family


def _workers(family):
    """Those of these processes that run actors or tasks."""
    found = set()
    for pid in family:
        with contextlib.suppress(OSError):
            if read(f"/proc/{pid}/cmdline").startswith(b"ray::"):
                found.add(pid)
    return found


def _directory(family):
    """The private directory, as the keeper's command line has it."""
    lines = [read(f"/proc/{pid}/cmdline").split(b"\0") for pid in family]
    (line,) = [line for line in lines if b"--keep" in line]
    return line[line.index(b"--keep") + 1].decode()


def _ports(family):
    """(host, port) of every TCP socket on which one of these processes listens."""
    inodes = set()
    for pid in family:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in read(f"/proc/net/{table}").decode().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                host, port = fields[1].split(":")
                found.add((socket.inet_ntoa(bytes.fromhex(host[-8:])[::-1]), int(port, 16)))
    return found


# Kill anything


def test_a_killed_owner_leaves_nothing(census):
    driver = census.start(DRIVER, "private")
    driver.line(40)
    assert len(census.processes()) >= 8
    driver.kill()
    assert census.gone(10) < 3


def test_ranks_share_their_runs_ray_and_outlive_each_other(census):
    ranks = [census.start(DRIVER, "private", run) for run in ("one", "one", "other")]
    addresses = [rank.line(50).split()[0] for rank in ranks]
    assert addresses[0] == addresses[1] != addresses[2]
    ranks[0].kill()
    ranks[2].kill()
    time.sleep(0.5)
    ranks[1].tell(CALL)
    assert ranks[1].line() == NODES_CPUS
    ranks[1].kill()
    census.gone(3)


@pytest.mark.parametrize("victim", ["rayloader.guardian rayloader/", "--keep", "/raylet/raylet"])
def test_when_its_keepers_die_ray_dies_and_its_owner_starts_another(census, victim):
    driver = census.start(DRIVER, "private")
    address = driver.line(40).split()[0]
    os.kill(census.pid_of(victim), signal.SIGKILL)
    deadline = time.monotonic() + 5
    while len(census.processes()) > 2:  # the driver, and the guardian unless it was the victim
        assert time.monotonic() < deadline, census.processes()
        time.sleep(0.05)
    if "rayloader/" in victim:
        driver.tell("cluster._state.guardian.ray(5)")
        assert "ClusterError the guardian of this run" in driver.line()
    driver.tell("cluster.connect('private').address")
    answer = driver.line(40)
    assert answer.startswith("said 127.0.0.1:")
    assert not answer.endswith(address)
    driver.kill()
    census.gone(3)


def test_readers_go_on_without_the_gcs_and_the_next_start_works(census):
    driver = census.start(DRIVER, "private")
    address = driver.line(40).split()[0]
    os.kill(census.pid_of("/gcs/gcs_server"), signal.SIGKILL)
    time.sleep(1)
    driver.tell(CALL)
    assert driver.line() == NODES_CPUS
    driver.tell("cluster.connect('private').address")
    answer = driver.line(40)
    assert answer.startswith("said 127.0.0.1:")
    assert not answer.endswith(address)
    driver.kill()
    census.gone(3)


def test_killing_the_owner_while_ray_starts_leaves_nothing(census):
    driver = census.start(DRIVER, "private")
    deadline = time.monotonic() + 20
    while not any("gcs_server" in line for line in census.processes().values()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    driver.kill()
    census.gone(5)


def test_leaving_and_joining_again_works_and_leaks_nothing(census):
    code = """
import os
from rayloader.cluster import connect, shutdown
counts = []
for _ in range(3):
    connect("private")
    counts.append(len(os.listdir("/proc/self/fd")))
    shutdown()
connect("private")
print(*counts, *[name for name in os.environ if name.startswith("RAY_AUTH")], flush=True)
"""
    driver = census.start(code)
    first, _, last = map(int, driver.line(50).split())
    assert last - first <= 4
    assert driver.wait() == (0, "")
    census.gone(3)


# A Ray that somebody else runs


@pytest.fixture(scope="module")
def stranger():
    """Another run's Ray, started by a rank that is bound to one core and has no home."""
    census = Census()
    core = str(min(os.sched_getaffinity(0)))
    driver = census.start(DRIVER, "private", prefix=["taskset", "-c", core], HOME="/nonexistent")
    yield driver, driver.line(40).split()[0]
    census.close()


def test_a_rank_bound_to_one_core_does_not_bind_its_readers(stranger):
    driver, _ = stranger
    driver.tell(CALL)
    assert driver.line() == NODES_CPUS


def test_a_ray_refuses_who_has_no_token(stranger, census):
    _, address = stranger
    code = "import sys; from rayloader import cluster; cluster.connect(sys.argv[1])"
    status, said = census.start(code, address).wait()
    assert status == 1
    assert "asks for a token: set RAY_AUTH_MODE" in said


STRANGER = """
import os, sys
from rayloader import cluster
{before}
connection = cluster.connect({choice!r})
print(connection.address, connection.private, connection.joined, connection.same_node, flush=True)
cluster.shutdown()
import ray
print(ray.is_initialized(), flush=True)
"""


def test_a_running_cluster_is_joined_and_outlives_who_joined_it(stranger, census):
    owner, address = stranger
    owner.tell("cluster._state.guardian.ray(5).token")
    secret = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": owner.line().split()[1]}
    by_hand = (
        "cluster._import_ray(None); import ray\n"
        f"with cluster._constants(ENABLE_RAY_CLUSTER=False): ray.init('{address}')"
    )
    ways = [
        census.start(STRANGER.format(before="", choice=address), **secret),
        census.start(STRANGER.format(before="", choice="auto"), RAY_ADDRESS=address, **secret),
        census.start(STRANGER.format(before="", choice="cluster"), RAY_ADDRESS=address, **secret),
        census.start(STRANGER.format(before=by_hand, choice="auto"), **secret),
    ]
    for way in ways[:3]:
        assert way.line() == f"{address} False True True"
        assert way.line() == "False"
    assert ways[3].line() == f"{address} False False True"
    assert ways[3].line() == "True"
    owner.tell(CALL)
    assert owner.line() == NODES_CPUS
