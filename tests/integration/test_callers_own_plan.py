"""Callers that know their ranks, lists and steps themselves: an MPI program, a benchmark."""

import os
import secrets
import time

import pytest

import rayloader
from rayloader import errors

SIZE = 20_000


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    directory = tmp_path_factory.mktemp("files")
    paths = [directory / f"{number:02}" for number in range(24)]
    for path in paths:
        path.write_bytes(os.urandom(SIZE))
    return [str(path) for path in paths]


@pytest.fixture(scope="module")
def launch():
    """A rank as an MPI program would name it."""
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    return rayloader.Launch(0, 1, 0, 1, secrets.token_hex(8), "test", cpus)


@pytest.fixture(scope="module")
def dataset(launch):
    with rayloader.RankDataset(launch=launch, batch_size=4, cpus="node") as it:
        yield it


def files_read(pid):
    """Files that a reader has read since it was started, once it reads no more [files]."""
    time.sleep(0.3)
    with open(f"/proc/{pid}/io") as file:
        (line,) = [line for line in file if line.startswith("rchar:")]
    return int(line.split()[1]) // SIZE


def files_read_after_each_step(dataset, files):
    """Of the second epoch of three steps, how many files the reader had read by each [files]."""
    dataset.set_epoch(0, files=files, steps=3)
    assert len(list(dataset)) == 3
    pid = dataset.receipt.reader_pid
    before = files_read(pid)
    dataset.set_epoch(1, files=files, steps=3)
    return [files_read(pid) - before for _ in dataset]


def test_each_epoch_has_the_batch_size_that_its_caller_gives(dataset, files):
    for epoch, (size, steps) in enumerate([(4, 6), (6, 4), (None, 6), (5, 4), (24, 1)]):
        dataset.set_epoch(epoch, files=files, steps=steps, batch_size=size)
        lengths = [len(batch) for batch in dataset]
        assert lengths == [size or 4] * steps


def test_the_last_batch_of_a_list_may_be_short(dataset, files):
    dataset.set_epoch(7, files=files, batch_size=9)
    assert [len(batch) for batch in dataset] == [9, 9, 6]


def test_a_state_inside_such_an_epoch_says_its_size(dataset, files, launch):
    dataset.set_epoch(8, files=files, batch_size=6)
    batches = iter(dataset)
    next(batches)
    state = dataset.state_dict()
    assert (state["batch_size"], state["step"], state["position"]) == (6, 1, 6)
    del batches
    other = rayloader.RankDataset(launch=launch, batch_size=4)
    with pytest.raises(errors.StateMismatch, match="batch_size=6"):
        other.load_state_dict(state)
    resumed = rayloader.RankDataset(launch=launch, batch_size=6)
    resumed.load_state_dict(state)
    resumed.set_epoch(8, files=files, batch_size=6)
    assert len(resumed) == 3


@pytest.mark.parametrize("given", [{"steps": 3}, {"batch_size": 3}])
def test_steps_and_batch_size_go_with_a_list(dataset, given):
    (name,) = given
    with pytest.raises(errors.OptionError, match=f"{name}=3 goes with files"):
        dataset.set_epoch(9, **given)


@pytest.mark.parametrize("size", [0, -1, 2.5])
def test_a_batch_has_a_whole_number_of_samples(dataset, files, size):
    with pytest.raises(errors.OptionError, match="batch_size"):
        dataset.set_epoch(9, files=files, batch_size=size)


@pytest.mark.parametrize(("ahead", "read"), [(0, [4, 8, 12]), (1, [8, 12, 12])])
def test_no_more_is_read_ahead_than_is_allowed(files, launch, ahead, read):
    with rayloader.RankDataset(launch=launch, batch_size=4, read_ahead_batches=ahead) as it:
        assert files_read_after_each_step(it, files) == read


def test_the_memory_in_force_is_known_once_it_is_open(dataset):
    assert 0 < dataset.memory_bytes <= dataset.options.memory_bytes


def test_the_readers_cpus_are_those_that_the_node_has_for_the_run(dataset, files, launch):
    dataset.set_epoch(20, files=files[:4])
    assert len(list(dataset)) == 1
    assert dataset.receipt.affinity == list(launch.node_cpus)


@pytest.mark.parametrize(
    ("place", "wrong"), [((2, 2, 0, 1), "rank=2"), ((0, 2, 1, 1), "local_rank=1")]
)
def test_a_place_outside_the_run_is_refused(place, wrong):
    with pytest.raises(errors.OptionError, match=wrong):
        rayloader.Launch(*place, None, "test")


def test_rank_and_place_are_given_once(launch):
    with pytest.raises(errors.OptionError, match="give either"):
        rayloader.RankDataset(launch=launch, rank=0, world_size=1)


def test_nothing_read_ahead_needs_the_local_channel():
    with pytest.raises(errors.OptionError, match=r"read_ahead_batches=0.*channel='ray'"):
        rayloader.Options(read_ahead_batches=0, channel="ray")
