"""Where a resource runs out it works all the same, or one error says what to set."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest

READ = """
import os, sys, resource, rayloader
with rayloader.RankDataset(sys.argv[1], batch_size=4, rank=0, world_size=1) as dataset:
    for epoch in range(2):
        dataset.set_epoch(epoch)
        read = {key: sample.numpy().tobytes() for batch in dataset
                for key, sample in zip(batch.keys, batch)}
        assert all(open(sys.argv[1] + "/" + key, "rb").read() == it for key, it in read.items())
    print(len(read), dataset.receipt.channel, dataset.receipt.memory_bytes, flush=True)
"""
FILES = 40
MIB = 1 << 20
LONG = "as long a name as a scheduler may choose for a temporary directory of a job/" * 2

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    for number in range(FILES):
        (root / f"{number}").write_bytes(os.urandom(1000 * number))
    return str(root)


def limited(*limits):
    return ["prlimit", *limits]


def read(census, directory, prefix=(), **environ):
    """A run that works: (files, channel, memory_bytes), and what it wrote on standard error."""
    reader = census.start(READ, directory, prefix=prefix, **environ)
    files, channel, memory = reader.line(50).split()
    status, said = reader.wait()
    assert (status, int(files), channel) == (0, FILES, "local"), said
    census.gone(10)
    return int(memory), said


def refused(census, directory, prefix=(), **environ):
    """A run that ends with an error: its last words."""
    status, said = census.start(READ, directory, prefix=prefix, **environ).wait(50)
    assert status == 1
    assert len(said.splitlines()) < 50
    census.gone(10)
    return said.splitlines()[-1]


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount or to limit")


def mounted(*commands):
    """Run with mounts of its own, made by these commands."""
    return ["unshare", "--mount", "bash", "-c", " && ".join([*commands, 'exec "$@"']), "-"]


def small(where, size):
    return f"mount -t tmpfs -o size={size} none {where}"


def fill(where):
    """Take what is left, at most a GB, so that a mistake does not fill the machine."""
    return f"(head -c 999m /dev/zero > {where}/full 2> /dev/null || true)"


@needs_root
def test_a_badly_set_up_node_suffices(census, directory, tmp_path):
    """All of it at once; none of it may be said, because none of it matters."""
    long = tmp_path / LONG
    long.mkdir(parents=True)
    limits = "umask 077; ulimit -n 64"
    prefix = mounted(small("/dev/shm", "64m"), fill("/dev/shm"), limits)
    environ = {"HOME": "/nonexistent", "TMPDIR": str(long), "LC_ALL": "C", "LANG": "C"}
    assert read(census, directory, prefix, **environ)[1] == ""


@needs_root
def test_a_full_tmp_and_a_read_only_home_suffice_where_another_place_is(census, directory):
    os.makedirs(f"{census.home}/ro")
    prefix = mounted(
        small(census.tmp, "1m"), fill(census.tmp), small("/dev/shm", "64m"),
        small(f"{census.home}/ro", "1m"), f"mount -o remount,ro {census.home}/ro",
    )  # fmt: skip
    assert read(census, directory, prefix, HOME=f"{census.home}/ro")[1] == ""


@needs_root
def test_where_no_place_is_left_the_error_names_them_all(census, directory):
    places = [census.tmp, "/var/tmp", "/dev/shm"]
    made = [command for place in places for command in (small(place, "1m"), fill(place))]
    # /tmp itself is where the code under test may lie.
    made.append("mount --bind /tmp /tmp && mount -o remount,bind,ro /tmp && cd /proc")
    said = refused(census, directory, mounted(*made))
    assert "no directory for temporary files (TMPDIR) can be used" in said
    for place in places:
        assert f"{place}: " in said
    assert said.startswith("rayloader.errors.ClusterError: ")


def test_too_little_address_space_names_the_limit(census, directory):
    prefix = limited(f"--as={2 << 30}")
    said = refused(census, directory, prefix)
    assert said.startswith("rayloader.errors.OptionError: too little address space")
    assert "(ulimit -v)" in said
    assert "allow at least" in said


@needs_root
def test_too_few_processes_name_the_limit(census, directory):
    # Another user, because root has no such limit, who may read whatever root may.
    may = "+dac_override,+dac_read_search"
    user = ["setpriv", "--reuid", "60123", "--inh-caps", may, "--ambient-caps", may]
    said = refused(census, directory, [*limited("--nproc=40"), *user])
    assert "ClusterError" in said
    assert "this user may run 40 processes and threads (ulimit -u)" in said
    assert "allow at least" in said


@pytest.fixture
def memory_group(request):
    """A memory cgroup of 600 MiB; (the prefix that enters it, its directory)."""
    place = None
    for mount, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
                         ("/sys/fs/cgroup", "memory.max")):  # fmt: skip
        place = f"{mount}/rayloader-test-{os.getpid()}"
        try:
            os.mkdir(place)
            with open(f"{place}/{limit}", "w") as file:
                file.write(f"{600 * MIB}")
            break
        except OSError:
            with contextlib.suppress(OSError):
                os.rmdir(place)
    else:
        pytest.skip("no memory cgroup can be made here")
    yield ["bash", "-c", f'echo $$ > {place}/cgroup.procs && exec "$@"', "-"], place
    os.rmdir(place)


HOG = """
import sys
with open(sys.argv[1], "wb") as file:
    for _ in range(700):
        file.write(bytes(1 << 20))
"""


def test_memory_is_clamped_to_what_the_cgroup_has_free_page_cache_aside(
    census, directory, memory_group, tmp_path
):
    enter, _ = memory_group
    # A job that has read or written files fills its group with page cache, which is no use.
    subprocess.run([*enter, sys.executable, "-c", HOG, str(tmp_path / "big")], check=True)
    memory, said = read(census, directory, enter)
    assert 100 * MIB < memory < 500 * MIB
    assert "memory_bytes=536,870,912 is more than" in said
    assert f"using {memory:,}" in said


OOM = """
import logging, os, sys, rayloader
logging.basicConfig(level=logging.WARNING)
with rayloader.RankDataset(
    sys.argv[1], batch_size=1, rank=0, world_size=1, read_ahead_batches=1, memory_bytes=32 << 20
) as dataset:
    for step, batch in enumerate(dataset):
        if step == 3:
            print(dataset.receipt.reader_pid, flush=True)
            sys.stdin.readline()
    print(step + 1, dataset.receipt.restarts, flush=True)
"""

EATER = """
import sys
for pid, score in ((sys.argv[1], 1000), ("self", 300)):
    with open(f"/proc/{pid}/oom_score_adj", "w") as file:
        file.write(str(score))
eaten = [b"x" * (1 << 20) for _ in range(1000)]
"""
"""Takes more than there is: the kernel kills the reader first, and the eater next."""


def test_a_reader_that_the_oom_killer_took_is_replaced_and_the_killer_named(
    census, directory, memory_group
):
    enter, _ = memory_group
    trainer = census.start(OOM, directory, prefix=enter)
    reader = trainer.line(50)
    eater = [*enter, sys.executable, "-c", EATER, reader]
    assert subprocess.run(eater, timeout=30).returncode == -signal.SIGKILL
    trainer.tell()
    assert trainer.line(40) == f"{FILES} 1"
    status, said = trainer.wait()
    assert status == 0
    assert "the kernel's out-of-memory killer struck in its memory cgroup meanwhile" in said
    census.gone(10)
