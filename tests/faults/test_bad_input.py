"""Whatever a name turns out to be: its bytes, or one error with file, cause, rank, epoch, batch."""

import contextlib
import errno
import os
import re
import socket
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pytest

import rayloader
from rayloader import errors
from tests import slow_mount
from tests.census import descriptors

EPOCH = 3
GOOD = b"good contents"


def opened(source=None, **options):
    return rayloader.RankDataset(source, **{"batch_size": 1, "rank": 0, "world_size": 1, **options})


@pytest.fixture(scope="module")
def dataset():
    """One data set that all bad lists are given to: none of them may spoil it."""
    with opened() as one:
        yield one


@pytest.fixture
def good(tmp_path):
    path = tmp_path / "good"
    path.write_bytes(GOOD)
    return str(path)


def contents(batches):
    return [sample.numpy().tobytes() for batch in batches for sample in batch]


def expect(dataset, good, bad, kind, cause):
    """Good, bad, good: the bad one is the second batch's error; the reader then goes on."""
    dataset.set_epoch(EPOCH, files=[good, bad, good])
    batches = iter(dataset)
    assert contents([next(batches)]) == [GOOD]
    with pytest.raises(kind) as caught:
        next(batches)
    error = caught.value
    assert type(error) is kind
    assert re.search(cause, str(error)), str(error)
    assert error.key == os.fsdecode(bad)
    assert errors.printable(error.key) in str(error)
    assert f"rank 0, epoch {EPOCH}, batch 1" in error.__notes__
    dataset.set_epoch(EPOCH, files=[good, good])
    assert contents(dataset) == [GOOD, GOOD]
    assert dataset.receipt.restarts == 0


def a_directory(path):
    os.mkdir(path)


def a_fifo(path):
    os.mkfifo(path)


def a_socket(path):
    here = os.getcwd()
    os.chdir(os.path.dirname(path))  # a socket's path is at most 107 bytes
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(os.path.basename(path))
    os.chdir(here)


def a_device(path):
    os.symlink("/dev/zero", path)


def a_terminal(path):
    os.symlink("/dev/tty", path)


def a_dangling_link(path):
    os.symlink("nowhere", path)


def a_link_to_itself(path):
    os.symlink(os.path.basename(path), path)


def nothing(path):
    pass


@pytest.mark.parametrize(
    ("make", "kind", "cause"),
    [
        (nothing, errors.ObjectNotFound, "no such file"),
        (a_dangling_link, errors.ObjectNotFound, "no such file"),
        (a_link_to_itself, errors.StorageError, "symbolic links"),
        (a_directory, errors.NotRegularFile, "not a regular file"),
        (a_fifo, errors.NotRegularFile, "not a regular file"),
        (a_socket, errors.NotRegularFile, "not a regular file"),
        (a_device, errors.NotRegularFile, "not a regular file"),
        (a_terminal, errors.NotRegularFile, "not a regular file"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_no_file_is_named(dataset, tmp_path, good, make, kind, cause):
    bad = str(tmp_path / "bad\nname")
    make(bad)
    expect(dataset, good, bad, kind, cause)


def test_a_file_below_a_file_and_a_name_too_long_are_named(dataset, tmp_path, good):
    expect(dataset, good, f"{good}/below", errors.ObjectNotFound, "no such file")
    expect(dataset, good, str(tmp_path / ("x" * 256)), errors.StorageError, "name too long")
    expect(dataset, good, "/" + "y/" * 2100, errors.StorageError, "name too long")


def test_an_empty_file_is_an_empty_sample(dataset, tmp_path, good):
    empty = tmp_path / "empty"
    empty.touch()
    dataset.set_epoch(0, files=[empty, good, empty])
    assert contents(dataset) == [b"", GOOD, b""]


UNREADABLE = """
import sys, rayloader
with rayloader.RankDataset(None, batch_size=1, rank=0, world_size=1) as dataset:
    for bad in sys.argv[2:]:
        dataset.set_epoch(3, files=[sys.argv[1], bad])
        batches = iter(dataset)
        next(batches)
        try:
            next(batches)
        except rayloader.AccessDenied as error:
            print(error.key, error.cause, error.__notes__[-1], sep="|", flush=True)
with rayloader.RankDataset(sys.argv[3].rpartition("/")[0], rank=0, world_size=1) as dataset:
    pass
"""


READ = """
import sys
sys.argv[1:1] = ["read"]
from rayloader.cli import main
main()
"""


def test_what_may_not_be_read_is_denied(tmp_path, good, census):
    closed = tmp_path / "closed"
    closed.mkdir()
    (closed / "file").write_bytes(b"secret")
    (tmp_path / "bad").write_bytes(b"secret")
    (tmp_path / "bad").chmod(0)
    closed.chmod(0)
    # Root reads everything, unless it has given that up.
    without = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]
    try:
        bad = [str(tmp_path / "bad"), str(closed / "file")]
        prefix = without if os.geteuid() == 0 else []
        user = census.start(UNREADABLE, good, *bad, prefix=prefix)
        for name in bad:
            assert user.line(30) == f"{name}|permission denied|rank 0, epoch 3, batch 1"
        status, said = user.wait()
        read = census.start(READ, str(tmp_path / "bad"), prefix=prefix)
        misused, complaint = read.wait()
    finally:
        closed.chmod(0o700)
    denied = f"rayloader: {tmp_path / 'bad'}: Permission denied"
    assert (misused, complaint.splitlines()) == (2, [denied])
    assert status == 1
    assert said.splitlines()[-1] == (
        f"rayloader.errors.CatalogError: {closed}/: the directory cannot be listed: "
        "Permission denied"
    )


# While it is being read

SIZE = 30 * 4096


@contextlib.contextmanager
def measured_but_not_read(directory, **options):
    """The fourth file is open and measured, and there is no room for it before the second is taken.

    Yields the iterator, of which the first batch is held, and the fourth file's path.
    """
    files = [directory / f"{number}" for number in range(4)]
    for number, path in enumerate(files):
        path.write_bytes(bytes([number]) * SIZE)
    with opened(memory_bytes=100 * 4096, **options) as dataset:
        dataset.set_epoch(EPOCH, files=files)
        batches = iter(dataset)
        held = next(batches)
        reader = dataset.receipt.reader_pid
        wait_for(lambda: is_open(reader, files[3]))
        yield batches, files[3], dataset
        assert held[0].numpy().tobytes() == bytes(SIZE)


def is_open(pid, path):
    links = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return str(path) in links


def wait_for(condition, seconds=10):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_file_cut_short_while_it_waits_is_truncated(tmp_path):
    with measured_but_not_read(tmp_path) as (batches, path, _):
        os.truncate(path, SIZE // 2)
        assert contents([next(batches), next(batches)]) == [b"\1" * SIZE, b"\2" * SIZE]
        with pytest.raises(errors.Truncated, match=f"{path}: ended before") as caught:
            next(batches)
    assert f"rank 0, epoch {EPOCH}, batch 3" in caught.value.__notes__


def test_a_truncated_file_may_be_skipped(tmp_path):
    with measured_but_not_read(tmp_path, on_error="skip") as (batches, path, dataset):
        os.truncate(path, 0)
        assert [len(batch) for batch in batches] == [1, 1, 0]
        (skipped,) = dataset.receipt.skipped
        assert (skipped.key, skipped.cause) == (str(path), "ended before its measured size")


def test_a_file_that_grows_while_it_waits_has_its_measured_size(tmp_path):
    with measured_but_not_read(tmp_path) as (batches, path, _):
        with open(path, "ab") as file:
            file.write(b"more" * 1000)
        assert contents(batches)[-1] == b"\3" * SIZE


@pytest.mark.parametrize("then", [b"x" * SIZE, b"shorter", None], ids=["same", "shorter", "gone"])
def test_a_file_replaced_while_it_waits_is_the_one_that_was_opened(tmp_path, then):
    with measured_but_not_read(tmp_path) as (batches, path, _):
        if then is None:
            os.unlink(path)
        else:
            (tmp_path / "new").write_bytes(then)
            os.rename(tmp_path / "new", path)
        assert contents(batches)[-1] == b"\3" * SIZE


def test_a_file_replaced_between_two_epochs_is_read_anew(dataset, tmp_path, good):
    for number in range(3):
        (tmp_path / "new").write_bytes(b"%d" % number * (1000 * number + 1))
        os.rename(tmp_path / "new", tmp_path / "it")
        dataset.set_epoch(0, files=[tmp_path / "it", good])
        assert contents(dataset)[0] == b"%d" % number * (1000 * number + 1)


# A mount that does not answer


@pytest.fixture
def mount(tmp_path):
    if not slow_mount.available():
        pytest.skip("needs root and /dev/fuse")
    (tmp_path / "mount").mkdir()
    one = slow_mount.SlowMount(os.fsencode(tmp_path / "mount"))
    one.files = {b"a": GOOD, b"b": b"never read", b"c": GOOD}
    yield one
    one.close()


@pytest.mark.parametrize("where", ["open", "read"])
def test_a_mount_that_never_answers_is_one_warning_then_an_error(mount, good, where, caplog):
    files = [good, os.fsdecode(mount.root) + "/b", good]
    if where == "open":
        mount.open_latency = 3600.0
    else:
        mount.stuck.add(b"b")
    began = time.monotonic()
    with opened(stall_seconds=0.5, read_timeout=2.5) as dataset:
        dataset.set_epoch(EPOCH, files=files)
        batches = iter(dataset)
        assert contents([next(batches)]) == [GOOD]
        called = time.monotonic()
        with pytest.raises(errors.StorageStalled, match=r"mount/b: no answer") as caught:
            next(batches)
        assert 2 < time.monotonic() - called < 8
        assert f"rank 0, epoch {EPOCH}, batch 1" in caught.value.__notes__
        assert isinstance(caught.value, TimeoutError)
        warned = [record.getMessage() for record in caplog.records]
        assert [text for text in warned if "still waiting" in text] == [
            text for text in warned if text.startswith(files[1])
        ]
        assert sum("still waiting" in text for text in warned) == 1
        dataset.set_epoch(EPOCH, files=[good, good])
        assert contents(dataset) == [GOOD, GOOD], "the reader goes on beside the hanging read"
        closing = time.monotonic()
    assert time.monotonic() - closing < 3, "close() does not wait for it"
    assert time.monotonic() - began < 50


# Names

ODD = [
    b"with space", b" leading and trailing ", b"new\nline", b"tab\t", b"a;b", b"100%", b"%20",
    b"a#b", b"a?b", b"a*b", b"[a-z]", b"**", b".hidden", b"..more", b"-rf", b"--", b"_under",
    b"~", b"$HOME", b"`id`", b"'", b'"', b"back\\slash", b"s3:", b"\xff\xfe not utf-8", b"\x7f\x01",
    "\N{PILE OF POO}".encode(), "e\N{COMBINING ACUTE ACCENT}".encode(), b"x" * 255,
    b"caf\xe9", b"a\rb", b"\xe2\x80\xae txt",
]  # fmt: skip


def test_every_name_that_a_file_can_have_is_read(tmp_path):
    root = os.fsencode(tmp_path) + b"/r [*]"
    os.mkdir(root)
    expected = {}
    for number, name in enumerate(ODD):
        below = root + b"/" + ODD[-number]
        os.makedirs(below, exist_ok=True) if number % 2 else None
        path = (below if number % 2 else root) + b"/" + name + b"-" * (len(name) < 250)
        with open(path, "wb") as file:
            file.write(b"%d: " % number + name)
        expected[os.fsdecode(path)] = b"%d: " % number + name
    listed = {os.fsdecode(root): None, None: list(expected)}
    for source, files in listed.items():
        with opened(source, batch_size=7) as dataset:
            dataset.set_epoch(0, files=files)
            seen = {}
            for batch in dataset:
                for key, sample in zip(batch.keys, batch, strict=True):
                    seen[os.path.join(source or "", key)] = sample.numpy().tobytes()
            assert seen == expected


@pytest.fixture
def deep(tmp_path):
    """A file whose path is as long as a path can be, and its contents."""
    room = 4095 - len(os.fsencode(tmp_path)) - 1
    parts = ["d" * 255] * (room // 256)
    rest = room - 256 * len(parts)
    if rest:
        parts.append("f" * rest)
    fd = os.open(tmp_path, os.O_RDONLY)
    for part in parts[:-1]:
        os.mkdir(part, dir_fd=fd)
        below = os.open(part, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    with open(os.open(parts[-1], os.O_WRONLY | os.O_CREAT, dir_fd=fd), "wb") as file:
        file.write(GOOD)
    os.close(fd)
    return "/".join(parts)


def test_the_longest_path_is_read(tmp_path, deep):
    path = f"{tmp_path}/{deep}"
    assert len(path) == 4095
    for source, files in ((tmp_path, None), (None, [path])):
        with opened(source) as dataset:
            dataset.set_epoch(0, files=files)
            assert contents(dataset) == [GOOD]


def test_a_path_longer_than_the_system_takes_is_named(tmp_path, deep):
    fd = os.open(os.path.dirname(f"{tmp_path}/{deep}"), os.O_RDONLY)
    os.mkdir("e" * 255, dir_fd=fd)
    os.close(fd)
    with pytest.raises(errors.CatalogError, match="cannot be listed: File name too long") as told:
        opened(tmp_path).open()
    assert str(told.value).isprintable()


# How many


def test_nothing_to_read_is_an_error_before_anything_starts(tmp_path):
    with pytest.raises(errors.EmptyCatalog, match=f"{tmp_path}"):
        opened(tmp_path).open()
    with pytest.raises(errors.EmptyCatalog):
        opened([]).open()
    with pytest.raises(errors.CatalogError, match="no such file"):
        opened(tmp_path / "none").open()


def test_an_own_list_of_nothing_is_an_error(dataset):
    with pytest.raises(errors.RayloaderError, match=r"empty|nothing"):
        dataset.set_epoch(0, files=[])


def test_one_file_is_one_batch(good, tmp_path):
    for options in ({}, {"batch_size": 1000}, {"ordered": False}):
        with opened(tmp_path, **options) as dataset:
            assert len(dataset) == 1
            assert contents(dataset) == [GOOD]


def test_fewer_files_than_ranks_is_an_error_on_every_rank_or_padded(good, tmp_path):
    for rank in range(2):
        with pytest.raises(errors.RayloaderError, match=r"1 .*2 ranks"):
            len(opened(tmp_path, rank=rank, world_size=2))
        with opened(tmp_path, rank=rank, world_size=2, uneven="pad") as dataset:
            assert contents(dataset) == [GOOD]


def test_a_batch_larger_than_the_data_is_short_or_dropped(good, tmp_path):
    with opened(tmp_path, batch_size=10_000_000) as dataset:
        assert [len(batch) for batch in dataset] == [1]
    with opened(tmp_path, batch_size=2, drop_last=True) as dataset:
        assert len(dataset) == 0
        assert list(dataset) == []


def test_a_million_names_cost_little_before_the_first_batch(good):
    names = np.char.add(good + "/../" * 0 + "", "").repeat(1_000_000)
    keys = pa.array(names.tolist(), pa.large_binary())
    source = rayloader.Catalog(os.path.dirname(os.fsencode(good)), keys)
    with opened(source, batch_size=4) as dataset:
        began = time.monotonic()
        batches = iter(dataset)
        assert contents([next(batches)]) == [GOOD] * 4
        assert time.monotonic() - began < 2
        assert len(dataset) == 250_000
        for _ in range(20):
            assert contents([next(batches)]) == [GOOD] * 4
        assert descriptors(dataset.receipt.reader_pid) < 1000


def test_a_batch_larger_than_the_memory_names_the_figure_and_its_place(tmp_path):
    for number in range(3):
        with open(tmp_path / f"{number}", "wb") as file:
            file.truncate(1 << 30 if number == 1 else 10)
    with opened(tmp_path, shuffle=False, memory_bytes=1 << 20) as dataset:
        batches = iter(dataset)
        assert len(next(batches)) == 1
        with pytest.raises(errors.BatchTooLarge, match="memory_bytes to at least 1,07") as caught:
            next(batches)
        assert "rank 0, epoch 0, batch 1" in caught.value.__notes__
        assert dataset.receipt.bytes_transferred < 1 << 20


# Leaving out


def test_what_is_skipped_is_listed_with_its_cause_and_steps_stay(tmp_path, good):
    files, causes = [], {}
    makers = {
        nothing: "no such file", a_directory: "not a regular file", a_fifo: "not a regular file",
        a_link_to_itself: os.strerror(errno.ELOOP),
    }  # fmt: skip
    for number in range(20):
        files.append(good)
        for make, cause in makers.items():
            if number == 7:
                files.append(str(tmp_path / make.__name__))
                make(files[-1])
                causes[files[-1]] = cause
    options = {"on_error": "skip", "batch_size": 3, "skip_budget_share": 1.0}
    with opened(**options, skip_budget_files=4) as dataset:
        dataset.set_epoch(EPOCH, files=files)
        assert [len(batch) for batch in dataset] == [3, 3, 2, 0, 3, 3, 3, 3]
        assert {one.key: one.cause for one in dataset.receipt.skipped} == causes
        assert dataset.receipt.files == 20
        assert dataset.receipt.steps == dataset.receipt.steps_expected == 8
    with opened(**options, skip_budget_files=3) as dataset:
        dataset.set_epoch(EPOCH, files=files)
        with pytest.raises(errors.SkipBudgetExceeded, match=r"4 samples .*, 3 may be") as caught:
            list(dataset)
        assert f"rank 0, epoch {EPOCH}, batch 3" in caught.value.__notes__
        cause = caught.value.__cause__
        assert isinstance(cause, errors.StorageError), "it came over the socket"
        assert cause.cause == causes[cause.key]


SCRIPT = """
import sys, rayloader
with rayloader.RankDataset(sys.argv[1:], rank=0, world_size=1) as dataset:
    assert sorted(batch.keys[0] for batch in dataset) == sys.argv[1:]
print(ascii(__file__))
"""


def test_a_script_and_its_directory_need_no_utf8_names(tmp_path, census):
    """Ray is told the command line, the script and where it runs."""
    place = tmp_path / "caf\udce9"
    place.mkdir()
    for name in ("train\udcff.py", "a\udcfe"):
        (place / name).write_text(SCRIPT)
    command = [sys.executable, "train\udcff.py", "a\udcfe"]
    environ = census.environ(PYTHONWARNINGS="error")
    ran = subprocess.run(command, cwd=place, env=environ, capture_output=True, timeout=50)
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert ran.stdout.endswith(b"train\\udcff.py'\n")
