"""Which files DLIO has given to a rank, and in how many steps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rayloader_dlio.assignment import Part, assigned, share, steps_here

from rayloader import OptionError
from tests.unit.dlio_arguments import arguments, dealt, old_arguments

NAMES = [f"/d/train/img_{number:03}" for number in range(48)]


def taken(args, ranks=1, time=1):
    return assigned(args, Part.of(args, True, time), ranks, "file")


@given(
    samples=st.integers(1, 48),
    threads=st.integers(1, 6),
    others=st.integers(0, 5),
    old=st.booleans(),
)
def test_samples_come_in_dlios_order_however_they_were_dealt_to_threads(
    samples, threads, others, old
):
    """Older versions reckon a thread's run with a rank that may have more samples than this."""
    if samples < threads:
        return
    most = samples + (others if old else 0)
    total = samples + most  # two ranks, this one the last
    by_thread = dealt(NAMES[:samples], threads, most // threads)
    changes = {"train_file_map": by_thread, "num_files_train": total}
    given_ = arguments(**changes) if old else arguments(files_pre_sharded=False, **changes)
    if old and -(-total // 2) != most:
        return
    assert taken(given_, ranks=2) == NAMES[:samples]


def test_with_an_index_samples_come_in_the_samplers_order():
    by_sample = {7: ("/c", 0), 5: ("/a", 0), 6: ("/b", 0)}
    given_ = arguments(data_loader_sampler="index", train_global_index_map=by_sample)
    assert taken(given_) == ["/a", "/b", "/c"]


@pytest.mark.parametrize("time", [1, 2, 5])
def test_the_sampler_of_dlio_2_shuffles_what_it_has_shuffled_before(time):
    indices = list(range(40))
    state = np.random.RandomState
    for _ in range(time):
        state(9).shuffle(indices)
    by_sample = {place: (NAMES[place], 0) for place in range(40)}
    given_ = old_arguments(
        data_loader_sampler="index", sample_shuffle="seed", seed=9, train_global_index_map=by_sample
    )
    assert taken(given_, time=time) == [NAMES[place] for place in indices]


def test_a_random_order_has_every_sample_once():
    by_sample = {place: (NAMES[place], 0) for place in range(40)}
    given_ = old_arguments(
        data_loader_sampler="index", sample_shuffle="random", train_global_index_map=by_sample
    )
    assert sorted(taken(given_)) == NAMES[:40]


def test_the_rest_that_fills_no_batch_is_told_and_not_read():
    given_ = arguments(train_file_map={0: [(n, NAMES[n], 0) for n in range(10)]}, batch_size=4)
    found = share(given_, Part.of(given_, True), 2, 1, "file")
    assert (found.files, found.rest) == (NAMES[:8], NAMES[8:10])
    assert (found.steps, found.batch_files, found.reader_steps) == (2, 4, 2)
    assert found.batches_before is None


@given(
    files=st.integers(1, 12),
    per_file=st.integers(2, 7),
    batch=st.integers(1, 9),
    cut=st.integers(0, 3),
)
def test_a_file_of_several_samples_is_read_once_and_before_its_first_step(
    files, per_file, batch, cut
):
    paths = [NAMES[place // per_file] for place in range(files * per_file)]
    steps = max(0, len(paths) // batch - cut)
    given_ = arguments(
        num_samples_per_file=per_file, batch_size=batch, train_file_map=dealt(paths, 1, len(paths))
    )
    found = share(given_, Part.of(given_, True), steps, 1, "file")
    assert len(set(found.files)) == len(found.files)
    assert not set(found.files) & set(found.rest)
    assert found.files + found.rest == NAMES[:files]
    arrived = 0
    for step in range(steps):
        arrived = found.batches_before[step] * found.batch_files
        assert set(paths[step * batch : (step + 1) * batch]) <= set(found.files[:arrived])
    assert arrived >= len(found.files)
    assert steps == 0 or found.batches_before[-1] == found.reader_steps


def test_fewer_samples_than_the_ranks_agreed_on_is_an_error():
    given_ = arguments(train_file_map={0: [(0, "/a", 0)]}, batch_size=4)
    with pytest.raises(OptionError, match=r"1 samples for train.*1 steps of 4"):
        share(given_, Part.of(given_, True), 1, 1, "file")


@pytest.mark.parametrize(
    ("args", "samples", "ranks", "steps"),
    [
        # The fork: training_steps is a ceiling before the first reshard.
        (arguments(files_pre_sharded=True, batch_size=24, training_steps=42), 1000, 2, 41),
        (arguments(files_pre_sharded=True, batch_size=24, training_steps=41), 1000, 2, 41),
        # The others: all files, and a rank may have one sample more than its share.
        (arguments(num_files_train=2001, batch_size=24), 1001, 2, 41),
        (arguments(num_files_train=95, batch_size=24), 48, 2, 1),
        (arguments(num_files_train=47, batch_size=24), 24, 2, 0),
        (old_arguments(num_files_train=47, batch_size=24), 24, 2, 1),
        (arguments(num_files_train=2000, batch_size=24, total_training_steps=7), 1000, 2, 7),
        (arguments(num_files_train=100, num_samples_per_file=4, batch_size=8), 200, 2, 25),
    ],
)
def test_steps_are_those_of_dlios_own_loader_and_loop(args, samples, ranks, steps):
    assert steps_here(args, Part.of(args, True), samples, ranks) == steps


def test_validation_does_not_end_with_the_training_steps():
    given_ = arguments(num_files_eval=40, batch_size_eval=2, total_training_steps=3)
    assert steps_here(given_, Part.of(given_, False), 20, 2) == 10


class VirtualIndex:
    """As the fork's: it holds a shuffled list of samples, and finds a sample by division."""

    def __init__(self, files, samples, per_file, asked):
        self._files, self._samples, self._per_file = files, samples, per_file
        self._asked = asked

    def __len__(self):
        return self._samples

    def __iter__(self):
        return iter(np.random.RandomState(1).permutation(self._samples))

    def __getitem__(self, sample):
        self._asked.append(sample)
        return self._files[sample // self._per_file], sample % self._per_file


@pytest.mark.parametrize("per_file", [1, 3])
@pytest.mark.parametrize("listed", ["/d", "d"])
def test_a_virtual_index_is_not_asked_for_every_sample_where_it_only_divides(per_file, listed):
    asked = []
    paths = [f"/d/{number:03}" for number in range(40)]
    given_ = arguments(
        files_pre_sharded=True,
        data_loader_sampler="index",
        num_samples_per_file=per_file,
        file_list_train=[path.replace("/d", listed) for path in paths],
        train_global_index_map=VirtualIndex(paths, 40 * per_file - 2, per_file, asked),
    )
    found = taken(given_)
    assert found == [paths[sample // per_file] for sample in range(40 * per_file - 2)]
    assert len(asked) <= 3 or listed == "d"
