"""Nobody else gets in: no port is exposed, no socket serves another user, no secret is written."""

import ctypes
import json
import os
import pickle
import re
import select
import signal
import socket
import traceback

import pytest

import rayloader
from rayloader import cluster, errors
from tests.census import read
from tests.integration.test_cluster import _directory, _family

pytestmark = pytest.mark.timeout(60)
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    for number in range(8):
        (root / str(number)).write_bytes(b"private contents")
    cluster.shutdown()
    with rayloader.RankDataset(root, rank=0, world_size=1, read_ahead_batches=1) as one:
        yield one


@pytest.fixture(scope="module")
def family(dataset):
    """Every process that this run has started."""
    return _family(cluster.guardian().pid)


def as_nobody(act, but_root=False):
    """The exit status of ``act`` in a child that has become another user for good.

    Args:
        act: returns it.
        but_root: make a user namespace first, in which that user is root.
    """
    child = os.fork()
    if child == 0:
        status = 99
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            if but_root:
                become_root_of_a_namespace()
            status = act()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


NO_NAMESPACES = 98
"""Exit status where the kernel lets no user have any."""
_CLONE_NEWUSER = 0x10000000


def become_root_of_a_namespace():
    """As in a container that is run without root."""
    # Who has changed users may not write below its own /proc unless it may be looked at.
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE
    if libc.unshare(_CLONE_NEWUSER):
        os._exit(NO_NAMESPACES)
    with open("/proc/self/uid_map", "w") as file:
        file.write(f"0 {NOBODY} 1")
    assert os.getuid() == 0


def own_sockets(processes):
    """Names of the abstract sockets on which these processes listen."""
    inodes = set()
    for pid in processes:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            try:
                inodes.add(os.readlink(f"/proc/{pid}/fd/{fd}")[8:-1])
            except OSError:
                continue
    names = set()
    for line in read("/proc/net/unix").decode().splitlines()[1:]:
        fields = line.split()
        if len(fields) == 8 and fields[7].startswith("@") and fields[6] in inodes:
            names.add("\0" + fields[7][1:])
    return names


# Without the token (ports: tests/faults/test_ports.py)


def test_rays_own_client_gets_nothing_without_the_token(dataset, census):
    """On this host the GCS can be reached."""
    code = """
import sys, ray
from ray._raylet import GcsClient
try:
    GcsClient(address=sys.argv[1]).get_all_node_info(timeout=5)
except Exception as error:
    print(type(error).__name__, str(error).splitlines()[0])
"""
    address = cluster.connect().address
    for secret in ({}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 64}):
        stranger = census.start(code, address, **secret)
        told = stranger.line(40)
        assert re.search("uthenticat|oken", told), told


# On this host


@needs_root
def test_another_user_cannot_attach_to_a_reader(dataset, tmp_path):
    """The reader waits for its trainer, and another user finds the name and comes first."""
    import ray

    from rayloader.actor import ReaderActor

    connection = cluster.connect()
    place = cluster.place_reader(connection)
    actor = ray.remote(ReaderActor).options(max_concurrency=4, **place)
    reader = actor.remote(dataset.options, [], "a run")
    name = "\0" + ray.get(reader.listen.remote(), timeout=30)

    def attach():
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one:
            one.settimeout(10)
            one.connect(name)
            try:
                from rayloader.channel.wire import PROTOCOL_VERSION, Kind, pack

                fd = os.memfd_create("mine")
                os.ftruncate(fd, 1 << 20)
                socket.send_fds(one, [pack(Kind.HELLO, PROTOCOL_VERSION)], [fd])
                answer = one.recv(99)
            except (BrokenPipeError, ConnectionResetError):
                answer = b""
            return 0 if answer == b"" else 1

    assert [as_nobody(attach) for _ in range(3)] == [0, 0, 0]
    assert as_nobody(attach, but_root=True) in (0, NO_NAMESPACES)
    # It still serves its own user.
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one:
        one.settimeout(10)
        one.connect(name)
        from rayloader import arena
        from rayloader.channel.wire import PROTOCOL_VERSION, Kind, pack, unpack

        fd = arena.create_memory(1 << 20)
        socket.send_fds(one, [pack(Kind.HELLO, PROTOCOL_VERSION)], [fd])
        os.close(fd)
        kind, _, facts = unpack(one.recv(1 << 17))
        assert kind is Kind.WELCOME
        life = os.pidfd_open(json.loads(facts)["pid"])
    ray.kill(reader)
    assert select.select([life], [], [], 20)[0], "it is of the family that the next tests look at"
    os.close(life)


def test_a_reader_that_has_its_trainer_is_to_be_attached_to_by_nobody(dataset):
    """Nor by a process of the same user: its socket is closed, though the kernel lists the name."""
    next(iter(dataset))
    found = own_sockets([dataset.receipt.reader_pid])
    names = {name for name in found if name.startswith("\0rayloader-")}
    assert names, "of the connection with its trainer"
    for name in names:
        one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with one, pytest.raises(ConnectionRefusedError):
            one.connect(name)
    assert list(dataset), "the trainer was not disturbed"


@needs_root
def test_another_user_gets_no_answer_from_any_socket(family, dataset):
    names = own_sockets(family)
    assert any("rayloader" in name for name in names), "the guardian listens"

    def ask():
        for name in names:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one:
                one.settimeout(5)
                try:
                    one.connect(name)
                    one.send(b'{"do": "ray"}')
                    if one.recv(99):
                        return 1
                except (BrokenPipeError, ConnectionResetError, ConnectionRefusedError):
                    pass
        return 0

    assert as_nobody(ask) == 0


@needs_root
def test_another_user_sees_no_memory_and_no_environment(family, dataset):
    batch = next(iter(dataset))
    assert batch[0].numpy().tobytes() == b"private contents"
    reader = dataset.receipt.reader_pid
    libc = ctypes.CDLL(None, use_errno=True)
    pidfd = os.pidfd_open(reader)

    def peep():
        for pid in (reader, os.getppid(), *family):
            for file in ("mem", "environ", "maps", "map_files", "fd", "fd/3"):
                try:
                    if os.path.isdir(path := f"/proc/{pid}/{file}"):
                        os.listdir(path)
                    else:
                        os.close(os.open(path, os.O_RDONLY))
                except (PermissionError, FileNotFoundError):
                    continue
                return 1
        if libc.syscall(438, pidfd, 3, 0) >= 0:  # pidfd_getfd
            return 2
        return 0 if libc.ptrace(16, reader, 0, 0) < 0 else 3  # PTRACE_ATTACH

    assert as_nobody(peep) == 0
    os.close(pidfd)


@needs_root
def test_the_runs_directory_is_closed_to_others(family, dataset):
    directory = _directory(family)
    assert os.stat(directory).st_mode & 0o777 == 0o700, "though Ray opens its own to everybody"

    def enter():
        try:
            os.listdir(directory)
        except PermissionError:
            return 0
        return 1

    assert as_nobody(enter) == 0


# Secrets


def secrets_of():
    token = cluster.guardian().ray(5).token
    assert len(token) >= 32
    return token


def test_the_token_is_in_no_command_line_and_in_no_other_file(family, dataset):
    token = secrets_of().encode()
    own = _directory(family)
    next(iter(dataset))
    for pid in {*family, os.getpid(), dataset.receipt.reader_pid}:
        assert token not in read(f"/proc/{pid}/cmdline")
    assert "RAY_AUTH_TOKEN" not in os.environ
    places = [own, os.path.expanduser("~/.ray"), "/tmp/ray", "/dev/shm"]
    for place in places:
        for folder, _, names in os.walk(place):
            for path in (os.path.join(folder, name) for name in names):
                if os.path.isfile(path) and os.stat(path).st_size < 1 << 26:
                    assert token not in read(path), path


def test_the_token_is_in_no_error_receipt_log_or_pickle(dataset, caplog, capfd):
    token = secrets_of()
    caplog.set_level(0)
    dataset.set_epoch(1)
    list(dataset)
    told = [repr(dataset.receipt), repr(dataset.options), repr(dataset.state_dict())]
    told += [repr(cluster.connect()), repr(cluster.guardian().ray(5)), repr(cluster.guardian())]
    told.append(repr(vars(cluster.guardian())))
    dataset.set_epoch(2)
    batches = iter(dataset)
    kept = next(batches)
    os.kill(dataset.receipt.reader_pid, signal.SIGKILL)
    list(batches)
    for pickled in (kept, dataset.receipt, dataset.options, dataset.state_dict()):
        assert token.encode() not in pickle.dumps(pickled)
    with pytest.raises(errors.UsageError) as refused:
        rayloader.RankDataset([b"x"], rank=0, world_size=1, ray="127.0.0.1:1").open()
    told += traceback.format_exception(refused.value)
    told += [record.getMessage() for record in caplog.records]
    told += capfd.readouterr()
    assert not [text for text in told if token in text]
    assert any("is gone" in text for text in told), "the log was looked at"
