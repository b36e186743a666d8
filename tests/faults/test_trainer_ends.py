"""However a trainer's process ends, nothing of it is left."""

import os
import select
import signal
import time

import pytest

from tests.faults import campaign

TRAINER = """
import ctypes, os, sys, time
import rayloader
def opened():
    return rayloader.RankDataset(sys.argv[1], batch_size=2, rank=0, world_size=1)
def numbers(batches):
    return sorted(int(key[:3]) for batch in batches for key in batch.keys)
def say(*words):
    print(*words, flush=True)
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    root = tmp_path_factory.mktemp("files")
    campaign.make_files(root)
    return str(root)


def wait_until(true, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not so within {seconds} s"
        time.sleep(0.02)


def test_kill_minus_nine_leaves_nothing_even_with_children_that_live_on(census, directory):
    code = """
dataset = opened()
batches = iter(dataset)
held = [next(batches) for _ in range(3)]
say(dataset.receipt.reader_pid)
if os.fork() == 0:
    say(os.getpid()); time.sleep(600)
if ctypes.CDLL(None).fork() == 0:  # behind Python's back: no descriptor is closed
    say(os.getpid()); time.sleep(600)
time.sleep(600)
"""
    trainer = census.start(TRAINER + code, directory)
    reader, *children = (int(trainer.line(60)) for _ in range(3))
    life = os.pidfd_open(reader)
    trainer.kill()
    killed = time.monotonic()
    assert select.select([life], [], [], campaign.promised(2))[0], "the reader lives on"
    os.close(life)
    wait_until(lambda: set(census.processes()) == set(children), campaign.promised(10))
    for child in children:
        os.kill(child, signal.SIGKILL)
    census.gone(campaign.promised(10) - (time.monotonic() - killed))


@pytest.mark.parametrize(
    ("last", "status", "said"),
    [
        ("", {0}, ""),
        ("raise ArithmeticError('mine')", {1}, "ArithmeticError: mine"),
        # Ray makes it 1, whatever the trainer does.
        ("say('ready'); time.sleep(600)", {1, -signal.SIGINT}, "KeyboardInterrupt"),
    ],
    ids=["exit", "exception", "Ctrl-C"],
)
def test_a_trainer_that_ends_without_close_leaves_nothing(census, directory, last, status, said):
    code = f"""
kept = []
dataset = opened()
batches = iter(dataset)
unfinished = opened()
next(iter(unfinished))
for batch in batches:
    kept.append(batch)
    if len(kept) == 5:
        {last or "break"}
"""
    trainer = census.start(TRAINER + code, directory)
    if "ready" in last:
        assert trainer.line(60) == "ready"
        os.kill(trainer.pid, signal.SIGINT)
    found, errors = trainer.wait(60)
    assert found in status, errors
    assert errors.strip().splitlines()[-1:] == ([said] if said else []), errors
    assert errors.count("Traceback") == bool(said), errors
    census.gone(campaign.promised(10))


def test_a_guardian_whose_starter_was_interrupted_before_it_joined_ends(census):
    code = """
import time
from rayloader import node
node._spawn(f"interrupted-{time.monotonic_ns()}", time.monotonic() + 20)
print("started", flush=True)
"""
    assert census.start(code).line() == "started"
    assert any("guardian" in line for line in census.processes().values())
    census.gone(campaign.promised(10))
