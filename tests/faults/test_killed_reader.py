"""A killed reader costs nothing: a few kills of the campaign, and the moments it may miss."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

import rayloader
from rayloader import cluster
from rayloader.channel import ReaderProcess
from tests.faults import campaign


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    root = tmp_path_factory.mktemp("files")
    campaign.make_files(root)
    return str(root)


def opened(source, **options):
    return rayloader.RankDataset(source, **{"batch_size": 1, "rank": 0, "world_size": 1, **options})


def numbers(batches):
    return [int(key[:3]) for batch in batches for key in batch.keys]


def blow(dataset, number):
    """Strike the reader; a blow that kills has fallen when this returns."""
    pid = dataset._loader._remote.welcome["pid"]
    pidfd = os.pidfd_open(pid)
    os.kill(pid, number)
    if number == signal.SIGKILL:
        assert select.select([pidfd], [], [], 10)[0]
    os.close(pidfd)


@pytest.mark.parametrize("seed", ["a", "b"])
def test_readers_killed_at_random_moments_cost_nothing(directory, seed):
    tally = campaign.run(5, seed, directory)
    assert tally.kills.total() >= 5
    assert tally.clean, str(tally)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda s: s.name)
def test_a_reader_that_dies_between_two_epochs_is_replaced(directory, number):
    with opened(directory, batch_size=8) as dataset:
        list(dataset)
        blow(dataset, number)
        assert sorted(numbers(dataset)) == list(range(campaign.FILES))
        assert dataset.receipt.restarts == 1


@pytest.mark.timeout(60)
@pytest.mark.parametrize("delay", [0, 0.02, 0.1, 0.3])
def test_a_reader_that_dies_while_starting_is_replaced(directory, delay, caplog):
    """Killed so many seconds after it was seen: made, listening, attached, or just ready."""
    with started_under_fire(1, delay) as victims, opened(directory, batch_size=8) as dataset:
        while not victims:
            time.sleep(0.01)
        assert sorted(numbers(dataset)) == list(range(campaign.FILES))
        assert len(victims) == 1
        assert dataset.receipt.reader_pid not in victims
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith("reader of rank 0 is gone (")


def test_readers_that_keep_dying_while_starting_are_one_error(directory):
    with (
        started_under_fire(9, 0) as victims,
        pytest.raises(rayloader.ReaderLost, match=r"does not come up \(max_restarts=1\)"),
    ):
        opened(directory, max_restarts=1).open()
    assert len(victims) == 2


@contextlib.contextmanager
def started_under_fire(kills, delay):
    """Kill that many readers, each ``delay`` [s] after it was seen; their processes' ids."""
    cluster.connect()
    old, victims, ended = set(psutil.pids()), [], threading.Event()

    def shoot():
        while not ended.wait(0.002) and len(victims) < kills:
            for pid in set(psutil.pids()) - old:
                if is_own_reader(pid):
                    old.add(pid)
                    time.sleep(delay)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                    victims.append(pid)

    thread = threading.Thread(target=shoot)
    thread.start()
    try:
        yield victims
    finally:
        ended.set()
        thread.join()


def is_own_reader(pid):
    """Whether this is a reader of this test's private Ray; others may run on the machine."""
    try:
        process = psutil.Process(pid)
        keeper = process.parent().parent()
        return process.cmdline()[0].startswith("ray::ReaderActor") and (
            keeper.ppid() == cluster.guardian().pid
        )
    except (psutil.Error, AttributeError, IndexError):
        return False


def test_a_reader_that_dies_before_its_first_epoch_is_replaced(directory):
    with opened(directory, batch_size=8) as dataset:
        blow(dataset, signal.SIGKILL)
        assert sorted(numbers(dataset)) == list(range(campaign.FILES))


def test_concurrency_of_a_dead_reader_is_that_of_the_next(directory):
    with opened(directory, read_ahead_batches=1) as dataset:
        batches = iter(dataset)
        first = [next(batches)]
        blow(dataset, signal.SIGKILL)
        dataset.concurrency = 1
        assert sorted(numbers([*first, *batches])) == list(range(campaign.FILES))
        assert dataset.receipt.restarts == 1


def waiting_for_a_stopped_reader(dataset):
    """An iteration whose next batch does not come until the reader is found out."""
    batches = iter(dataset)
    next(batches)
    blow(dataset, signal.SIGSTOP)
    return batches


def test_ctrl_c_ends_the_wait_for_a_stopped_reader_at_once(directory):
    with opened(directory, read_ahead_batches=1, batch_size=8) as dataset:
        batches = waiting_for_a_stopped_reader(dataset)
        main = threading.main_thread().ident
        interrupt = threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT))
        began = time.monotonic()
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            list(batches)
        assert time.monotonic() - began < 0.9, "before the reader is looked at"
        dataset.set_epoch(0)
        assert sorted(numbers(dataset)) == list(range(campaign.FILES))


def test_closing_ends_the_wait_of_another_thread(directory):
    outcome = []

    def wait(batches):
        try:
            outcome.extend(batches)
        except BaseException as error:
            outcome.append(error)

    with opened(directory, read_ahead_batches=1, batch_size=8) as dataset:
        batches = waiting_for_a_stopped_reader(dataset)
        thread = threading.Thread(target=wait, args=(batches,))
        thread.start()
        time.sleep(0.2)
        dataset.close()
        thread.join(2)
        assert not thread.is_alive()
    assert isinstance(outcome[-1], rayloader.UsageError)
    assert len(outcome) <= 2, "at most the batch that was there already"


def test_dropping_more_than_a_stopped_reader_can_be_told_does_not_hang(directory):
    """A socket takes some hundred releases; nobody may wait for the rest to be taken."""
    path = os.path.join(directory, "001.bin")
    with opened(None, memory_bytes=64 << 20) as dataset:
        dataset.set_epoch(0, files=[path] * 2000)
        batches = iter(dataset)
        held = [next(batches) for _ in range(900)]
        assert dataset.receipt.private_copies == 0
        blow(dataset, signal.SIGSTOP)
        del held
        dataset.concurrency = 2
        assert sum(1 for _ in batches) == 1100
        assert dataset.receipt.restarts <= 1
        dataset.set_epoch(1, files=[path] * 900)
        assert len(list(dataset)) == 900


def test_what_is_held_survives_two_readers_in_a_row(directory):
    with opened(directory, read_ahead_batches=1, memory_bytes=8 << 20) as dataset:
        held = []
        for step, batch in enumerate(dataset):
            held.append((batch, numbers([batch])[0]))
            if step in (20, 21):
                blow(dataset, signal.SIGKILL)
        assert dataset.receipt.restarts == 2
        assert sorted(number for _, number in held) == list(range(campaign.FILES))
        dataset.set_epoch(1)
        list(dataset)
        assert all(b[0].numpy().tobytes() == campaign.content(n) for b, n in held)


def test_what_is_held_survives_an_error_of_the_reader(directory, tmp_path):
    gone = tmp_path / "gone.bin"
    with opened(None, memory_bytes=1 << 20) as dataset:
        files = [os.path.join(directory, f"{number:03}.bin") for number in range(20)]
        dataset.set_epoch(0, files=[*files[:5], gone])
        batches = iter(dataset)
        held = [next(batches) for _ in range(5)]
        with pytest.raises(rayloader.ObjectNotFound):
            next(batches)
        dataset.set_epoch(1, files=files[5:])
        assert len(list(dataset)) == 15
        for number, batch in enumerate(held):
            assert batch[0].numpy().tobytes() == campaign.content(number)


def test_a_killed_process_has_ended_when_its_successor_may_start():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        process = ReaderProcess(child.pid)
        os.kill(child.pid, signal.SIGSTOP)
        assert process.kill()
        with open(f"/proc/{child.pid}/stat", "rb") as stat:
            assert stat.read().rpartition(b")")[2].split()[0] == b"Z"
        process.close()
