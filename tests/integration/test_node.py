"""One guardian per node and run: elected, shared, and gone with its last owner, however it goes."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayloader import config
from rayloader import guardian as guarding
from rayloader.catalog import Catalog
from rayloader.errors import CatalogError, ClusterError, EmptyCatalog
from rayloader.node import Guardian, parent_run_id, socket_name
from tests.census import descriptors

OWNER = """
import sys
from rayloader.node import Guardian
guardian = Guardian.join(sys.argv[1], 20)
print(guardian.pid, flush=True)
for line in sys.stdin:
    try:
        print("said", eval(line), flush=True)
    except Exception as error:
        print(type(error).__name__, error, flush=True)
"""

MEMFD = """
import os
def memfd(text):
    fd = os.memfd_create("test")
    os.write(fd, text)
    return fd
def content(fd):
    try:
        return os.pread(fd, 99, 0).decode(), os.fstat(fd).st_ino
    finally:
        os.close(fd)
"""


@pytest.fixture
def run_id():
    return f"test-{os.getpid()}-{time.monotonic_ns()}"


def serves(guardian):
    """Have a descriptor shared, and forget it."""
    os.close(guardian.shared("it serves", lambda: os.open(os.devnull, os.O_RDONLY), 5))
    guardian.forget("it serves")
    return True


def wait_until(true, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not so within {seconds} s"
        time.sleep(0.01)


def is_bound(run_id):
    with open("/proc/net/unix", "rb") as file:
        return b"@" + socket_name(run_id)[1:] in file.read()


def test_four_ranks_that_come_at_once_find_one_guardian(census, run_id):
    for turn in range(5):
        ranks = [census.start(OWNER, f"{run_id}-{turn}") for _ in range(4)]
        assert len({rank.line() for rank in ranks}) == 1
        assert len(census.processes()) == 5
        for rank in ranks:
            rank.kill()
        census.gone(2)


def test_two_runs_do_not_meet(census, run_id):
    one, other = census.start(OWNER, run_id), census.start(OWNER, run_id + "-other")
    assert one.line() != other.line()


def test_a_process_by_itself_has_its_own_guardian():
    with Guardian.join(None, 20) as one, Guardian.join(None, 20) as other:
        assert one.pid != other.pid


def test_the_guardian_lives_until_its_last_owner_is_killed(census, run_id):
    one, other = census.start(OWNER, run_id), census.start(OWNER, run_id)
    guardian = int(one.line())
    assert int(other.line()) == guardian
    one.kill()
    time.sleep(0.3)
    assert guardian in census.processes()
    other.kill()
    census.gone(2)
    assert not is_bound(run_id)


def test_a_child_that_an_owner_forked_does_not_keep_the_guardian(census, run_id):
    owner = census.start(OWNER, run_id)
    guardian = int(owner.line())
    # A fork behind Python's back closes no socket; the process descriptor tells the truth.
    owner.tell("__import__('ctypes').CDLL(None).fork() or __import__('time').sleep(60)")
    wait_until(lambda: len(census.processes()) == 3)
    owner.kill()
    wait_until(lambda: guardian not in census.processes())
    assert len(census.processes()) == 1


def test_a_forked_child_is_no_owner(census, run_id):
    owner = census.start("import os\n" + OWNER, run_id)
    owner.line()
    owner.tell("os.fork() == 0 and (print(guardian.alive(), flush=True), os._exit(0))")
    assert {owner.line(), owner.line()} == {"False", "said False"}
    owner.tell("guardian.alive()")
    assert owner.line() == "said True"


def test_leaving_and_coming_back_at_once_always_finds_a_guardian(run_id):
    for _ in range(20):
        with Guardian.join(run_id, 20) as guardian:
            assert serves(guardian)


def test_a_killed_guardian_is_a_precise_error(run_id):
    with Guardian.join(run_id, 20) as guardian:
        os.kill(guardian.pid, signal.SIGKILL)
        wait_until(lambda: not guardian.alive())
        with pytest.raises(ClusterError, match=rf"guardian.*process {guardian.pid}.*is gone"):
            serves(guardian)


def test_a_guardian_that_is_told_to_stop_does(census, run_id):
    owner = census.start(OWNER, run_id)
    guardian = int(owner.line())
    os.kill(guardian, signal.SIGINT)
    os.kill(guardian, signal.SIGHUP)
    time.sleep(0.2)
    assert guardian in census.processes()
    os.kill(guardian, signal.SIGTERM)
    wait_until(lambda: guardian not in census.processes())


def test_one_rank_makes_and_all_receive(census, run_id):
    ranks = [census.start(MEMFD + OWNER, run_id) for _ in range(4)]
    for rank in ranks:
        rank.line()
    for number, rank in enumerate(ranks):
        rank.tell(f"content(guardian.shared('catalog', lambda: memfd(b'by {number}'), 10))")
    heard = {rank.line() for rank in ranks}
    assert len(heard) == 1
    assert "by " in heard.pop()


def test_a_maker_that_dies_is_succeeded(census, run_id):
    maker, heir = (census.start(MEMFD + OWNER, run_id) for _ in range(2))
    maker.line(), heir.line()
    maker.tell("guardian.shared('c', lambda: print('making', flush=True) or input(), 10)")
    assert maker.line() == "making"
    heir.tell("content(guardian.shared('c', lambda: memfd(b'by the heir'), 10))")
    time.sleep(0.2)
    maker.kill()
    assert "by the heir" in heir.line(5)


def test_a_maker_that_fails_gives_its_error_to_those_who_wait(run_id):
    raised = []
    making = threading.Event()

    def make():
        making.set()
        time.sleep(0.3)
        raise EmptyCatalog("nothing in /data")

    with Guardian.join(run_id, 20) as one, Guardian.join(run_id, 20) as other:

        def wait():
            assert making.wait(5)
            try:
                other.shared("c", lambda: pytest.fail("not asked"), 5)
            except CatalogError as error:
                raised.append(error)

        waiter = threading.Thread(target=wait)
        waiter.start()
        with pytest.raises(EmptyCatalog, match="nothing in /data"):
            one.shared("c", make, 5)
        waiter.join(5)
        assert type(raised[0]) is EmptyCatalog
        assert "another rank" in raised[0].__notes__[0]
        fd = other.shared("c", lambda: os.memfd_create("again"), 5)
        os.close(fd)


def test_waiting_too_long_names_the_maker(census, run_id):
    maker = census.start(OWNER, run_id)
    maker.line()
    maker.tell("guardian.shared('c', lambda: print('making', flush=True) or input(), 10)")
    maker.line()
    with (
        Guardian.join(run_id, 20) as guardian,
        pytest.raises(ClusterError, match=rf"0.2 s.*'c'.*process {maker.pid}"),
    ):
        guardian.shared("c", lambda: pytest.fail("not asked"), 0.2)


def test_what_all_have_forgotten_is_closed(run_id):
    with Guardian.join(run_id, 20) as guardian:
        before = descriptors(guardian.pid)
        for turn in range(50):
            for _ in range(2):
                os.close(guardian.shared(f"c{turn}", lambda: os.memfd_create("c"), 5))
            assert descriptors(guardian.pid) > before
            guardian.forget(f"c{turn}")
            guardian.forget(f"c{turn}")
        wait_until(lambda: descriptors(guardian.pid) == before)


def test_what_a_dead_owner_held_is_closed(census, run_id):
    owner = census.start(MEMFD + OWNER, run_id)
    owner.line()
    with Guardian.join(run_id, 20) as guardian:
        before = descriptors(guardian.pid)
        owner.tell("content(guardian.shared('c', lambda: memfd(b'x'), 5))")
        owner.line()
        assert descriptors(guardian.pid) >= before + 1
        owner.kill()
        wait_until(lambda: descriptors(guardian.pid) < before)


@pytest.fixture(scope="module")
def one_guardian():
    with Guardian.join(None, 20) as guardian:
        yield guardian


WORDS = st.sampled_from(["do", "join", "ray?", "shared", "forget", "name", "made", "failed"])
JSON = st.recursive(st.none() | st.integers() | WORDS, lambda x: st.dictionaries(WORDS, x))


@settings(deadline=None)
@given(st.one_of(st.binary(min_size=1, max_size=99), JSON.map(lambda x: repr(x).encode())))
def test_no_message_disturbs_the_guardian(one_guardian, message):
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as stranger:
        stranger.connect(socket_name(one_guardian.run_id))
        stranger.send(message.replace(b"'", b'"'))
    assert serves(one_guardian)


def test_a_rank_that_never_reads_does_not_hold_up_the_others(one_guardian):
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as mute:
        mute.setblocking(False)
        mute.connect(socket_name(one_guardian.run_id))
        with contextlib.suppress(OSError):
            for _ in range(100_000):
                mute.send(b'{"do": "forget", "name": "n"}')
        assert serves(one_guardian)


needs_root = pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")


@needs_root
def test_another_user_is_not_served(one_guardian):
    code = """
import os, socket, sys
os.setuid(65534)
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
    stranger.settimeout(5)
    stranger.connect(sys.argv[1].encode().replace(b"!", b"\\0"))
    try:
        stranger.send(b'{"do": "join"}')
        print(stranger.recv(100))
    except (BrokenPipeError, ConnectionResetError):
        print(b"")
"""
    name = socket_name(one_guardian.run_id).decode().replace("\0", "!")
    said = subprocess.run([sys.executable, "-c", code, name], capture_output=True, text=True)
    assert said.stdout.strip() == "b''", said.stderr


@needs_root
def test_a_socket_that_another_user_holds_is_refused(census, run_id):
    squatter = census.start(
        "import os, socket, sys; os.setuid(65534)\n"
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "s.bind(sys.argv[1].encode().replace(b'!', b'\\0')); s.listen()\n"
        "print('there', flush=True); input()",
        socket_name(run_id).decode().replace("\0", "!"),
    )
    squatter.line()
    with pytest.raises(ClusterError, match="another user"):
        Guardian.join(run_id, 5)


def test_the_guardian_is_small():
    code = "import sys, rayloader.guardian; print(*{'ray', 'torch', 'numpy'} & set(sys.modules))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == ""


def test_the_guardian_inherits_no_rank_and_no_descriptor(census, run_id):
    keep, give = os.pipe()
    os.set_inheritable(give, True)
    owner = census.start(OWNER, run_id, RANK="0", WORLD_SIZE="1", OMP_NUM_THREADS="1", KEPT="1")
    guardian = int(owner.line())
    with open(f"/proc/{guardian}/environ") as file:
        environ = dict(item.split("=", 1) for item in file.read().split("\0") if item)
    assert not {"RANK", "WORLD_SIZE", "OMP_NUM_THREADS"} & set(environ)
    assert environ["KEPT"] == "1"
    links = [os.readlink(f"/proc/{guardian}/fd/{fd}") for fd in os.listdir(f"/proc/{guardian}/fd")]
    assert not [
        link for link in links if link.startswith("pipe:") and str(os.fstat(keep).st_ino) in link
    ]
    assert {os.readlink(f"/proc/{guardian}/fd/{fd}") for fd in range(3)} == {os.devnull}
    os.close(keep), os.close(give)


def test_ranks_of_a_silent_launcher_share_their_parent():
    code = "from rayloader.node import parent_run_id; print(parent_run_id())"
    said = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
        for _ in range(2)
    }
    assert len(said) == 1
    assert said.pop().strip() != parent_run_id()


def test_a_private_directory_is_short_private_and_locked(tmp_path, monkeypatch):
    directory, lock = guarding.private_directory()
    try:
        assert os.stat(directory).st_mode & 0o777 == 0o700
        assert len(directory) <= config.DIRECTORY_BYTES
        guarding._sweep(os.path.dirname(directory))
        assert os.path.isdir(directory)
    finally:
        os.close(lock)
    guarding._sweep(os.path.dirname(directory))
    assert not os.path.exists(directory)


def test_a_long_tmpdir_is_passed_over(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 80)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    directory, lock = guarding.private_directory()
    os.close(lock)
    guarding.remove(directory)
    assert not directory.startswith(str(long))


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("/proc", "No such file"),
        ("/nowhere", "No such file"),
        ("/x" * 40, "long"),
        ("/tmp/ü", "characters"),
    ],
)
def test_a_place_that_will_not_do_says_why(place, why):
    with pytest.raises(OSError, match=why):
        guarding._directory_in(place)


@needs_root
def test_a_full_tmpdir_is_passed_over_with_its_reason(census):
    code = """
import os, subprocess, sys, tempfile
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", sys.argv[1]], check=True)
from rayloader import guardian
try:
    print(guardian._directory_in(sys.argv[1]))
except OSError as error:
    print(error.strerror, os.listdir(sys.argv[1]))
"""
    prefix = ["unshare", "--mount"]
    if subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip("no mount namespace here")
    full = census.start(code, census.tmp, prefix=prefix)
    assert full.line() == "less than 16 MiB are free []"


DIGESTS = """
import sys, types, rayloader
from rayloader import catalog
computed, blake2b = [], catalog.hashlib.blake2b
catalog.hashlib = types.SimpleNamespace(blake2b=lambda **it: computed.append(1) or blake2b(**it))
dataset = rayloader.RankDataset(sys.argv[1])
print(dataset.catalog.digest, len(computed), flush=True)
sys.stdin.readline()
dataset.close()
rayloader.shutdown()
"""


def test_of_the_ranks_on_a_node_one_computes_the_digest_of_a_saved_catalog(census, tmp_path):
    saved = tmp_path / "saved.arrow"
    catalog = Catalog.of_files(["a", "b", "c"])
    catalog.save(saved)
    ranks = [
        census.start(
            DIGESTS, str(saved), RANK=str(rank), WORLD_SIZE="3", LOCAL_RANK=str(rank),
            LOCAL_WORLD_SIZE="3", TORCHELASTIC_RUN_ID=census.mark, MASTER_ADDR="127.0.0.1",
            MASTER_PORT="1",
        )
        for rank in range(3)
    ]  # fmt: skip
    said = [rank.line(30).split() for rank in ranks]
    assert {digest for digest, _ in said} == {catalog.digest}
    assert sorted(count for _, count in said) == ["0", "0", "1"]
    for rank in ranks:
        rank.tell()
        assert rank.wait() == (0, "")
    census.gone(10)
