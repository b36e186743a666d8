"""What a user reads when something is wrong: one screen at most, in the user's words."""

import contextlib
import os
import pickle
import signal
import threading
import time
import traceback

import pytest

import rayloader
from rayloader import cluster, errors, remote
from tests.census import read
from tests.integration.test_cluster import _family

pytestmark = pytest.mark.timeout(60)
SCREEN = 50
"""Lines."""
LINE = 400
"""Characters: a sentence and the names in it."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    for number in range(6):
        (root / str(number)).write_bytes(bytes(20_000))
    yield str(root)
    cluster.shutdown()


def opened(source, **options):
    return rayloader.RankDataset(source, **{"rank": 0, "world_size": 1, **options})


def an_unknown_option(directory):
    opened(directory, batchsize=3)


def a_bad_value(directory):
    opened(directory, concurrency="many")


def no_such_directory(directory):
    opened(directory + "/none").open()


def nothing_to_read(directory):
    opened(directory + "/*.nothing").open()


def fewer_files_than_ranks(directory):
    len(opened(directory, rank=0, world_size=7))


def a_foreign_state(directory):
    with opened(directory) as dataset:
        dataset.load_state_dict({**dataset.state_dict(), "seed": 99})


def a_missing_file(directory):
    with opened(None) as dataset:
        dataset.set_epoch(0, files=[directory + "/none\nat all"])
        list(dataset)


def a_batch_too_large(directory):
    with opened(directory, batch_size=6, memory_bytes=65536) as dataset:
        list(dataset)


def too_many_to_skip(directory):
    with opened(["/a", "/b", "/c"], on_error="skip") as dataset:
        list(dataset)


def a_closed_data_set(directory):
    dataset = opened(directory)
    dataset.close()
    dataset.open()


def a_dead_address(directory):
    cluster.shutdown()
    opened(directory, ray="127.0.0.1:1").open()


def no_ray_here(directory):
    cluster.shutdown()
    os.environ["RAY_TMPDIR"] = directory
    try:
        opened(directory, ray="cluster").open()
    finally:
        del os.environ["RAY_TMPDIR"]


def too_little_time(directory):
    cluster.shutdown()
    opened(directory, start_timeout=0.01).open()


def a_reader_that_is_lost(directory):
    with opened(directory, max_restarts=0, read_ahead_batches=1) as dataset:
        for _ in dataset:
            os.kill(dataset.receipt.reader_pid, signal.SIGKILL)


def a_reader_that_does_not_start(directory):
    """Killed as soon as it is seen, by a thread."""
    cluster.connect()
    family = cluster.guardian().pid
    old, ended = _family(family), threading.Event()

    def kill():
        while not ended.is_set():
            for pid in _family(family) - old:
                with contextlib.suppress(OSError):
                    if b"ray::ReaderActor" in read(f"/proc/{pid}/cmdline"):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        opened(directory).open()
    finally:
        ended.set()
        thread.join()


def a_reader_with_no_place(directory):
    place = cluster.place_reader

    def elsewhere(connection):
        import dataclasses

        return place(dataclasses.replace(connection, node_id="ab" * 28))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote.cluster, "place_reader", elsewhere)
        opened(directory).open()


SITUATIONS = {
    an_unknown_option: (errors.OptionError, "did you mean 'batch_size'"),
    a_bad_value: (errors.OptionError, "concurrency='many': must be a whole number"),
    no_such_directory: (errors.CatalogError, "/none: no such file or directory"),
    nothing_to_read: (errors.EmptyCatalog, "*.nothing"),
    fewer_files_than_ranks: (errors.RayloaderError, "7 ranks"),
    a_foreign_state: (errors.StateMismatch, "seed=99"),
    a_missing_file: (errors.ObjectNotFound, "/none\\nat all: no such file"),
    a_batch_too_large: (errors.BatchTooLarge, "set memory_bytes to at least"),
    too_many_to_skip: (errors.SkipBudgetExceeded, "skip_budget_files"),
    a_reader_that_is_lost: (errors.ReaderLost, "max_restarts=0"),
    a_reader_that_does_not_start: (
        errors.ReaderLost,
        "does not come up (max_restarts=3)",
    ),
    a_reader_with_no_place: (errors.PlacementFailed, "cannot place the reader on this node"),
    a_closed_data_set: (errors.UsageError, "make a new one"),
    a_dead_address: (errors.ClusterUnreachable, "no Ray answers at 127.0.0.1:1"),
    no_ray_here: (errors.ClusterUnreachable, "ray start --head"),
    too_little_time: (errors.ClusterError, "start_timeout"),
}


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda situation: situation.__name__)
def test_it_is_one_screen_in_the_users_words(directory, situation, capfd):
    kind, words = SITUATIONS[situation]
    with pytest.raises(errors.RayloaderError) as caught:
        situation(directory)
    error = caught.value
    assert isinstance(error, kind)
    first = str(error).splitlines()[0]
    assert words in first
    assert len(first) <= LINE
    assert first.isprintable()
    assert not first.endswith((":", ","))
    shown = printed(error)
    assert "ray.exceptions" not in shown
    assert "site-packages/ray/" not in shown
    assert len(shown.splitlines()) <= SCREEN
    assert capfd.readouterr() == ("", ""), "Ray says nothing beside"
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (type(error), str(error))


def printed(error):
    """What an uncaught error prints: its causes, its traceback, without this file's frames."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def test_rays_own_account_is_there_when_asked_for(directory, monkeypatch):
    monkeypatch.setenv("RAYLOADER_DEBUG", "1")
    with pytest.raises(errors.PlacementFailed) as caught:
        a_reader_with_no_place(directory)
    assert "ray.exceptions" in printed(caught.value)


SCRIPT = """
import os, sys, rayloader
with rayloader.RankDataset(sys.argv[1], rank=0, world_size=1, read_ahead_batches=1) as dataset:
    for step, batch in enumerate(dataset):
        if step == 1:
            os.kill(dataset.receipt.reader_pid, 9)
        if step == 3:
            dataset.set_epoch(0, files=["/none"])
            list(dataset)
"""


def test_a_plain_script_ends_with_its_error_and_a_line_for_each_restart(directory, census):
    status, said = census.start(SCRIPT, directory).wait(50)
    census.gone(10)
    lines = said.splitlines()
    assert status == 1
    assert "reader of rank 0 is gone" in lines[0]
    assert lines[0].endswith("; starting another")
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[-2:] == [
        "rayloader.errors.ObjectNotFound: /none: no such file",
        "rank 0, epoch 0, batch 0",
    ]
    assert len(lines) < SCREEN
