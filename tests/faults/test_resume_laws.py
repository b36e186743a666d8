"""From every position of an epoch, a data set that loads the state yields exactly the rest.

Readers are started once per kind and lent from one data set to the next, which is as new in all
that the laws speak of: its position, shard, options and plan.
"""

import collections
import itertools
import json
import pickle

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torchdata.stateful_dataloader import StatefulDataLoader

import rayloader
from rayloader import errors

FILES = 23
_GENERATIONS = itertools.count(1)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    root = tmp_path_factory.mktemp("train")
    for number in range(FILES):
        (root / f"{number:02}").write_bytes(bytes([number]) * (number + 1))
    return root


@pytest.fixture(scope="module")
def reader(directory):
    with opened(directory) as dataset:
        yield dataset


@pytest.fixture(scope="module")
def hasty(directory):
    with opened(directory, ordered=False, concurrency=3) as dataset:
        yield dataset


@pytest.fixture(scope="module")
def forgiving(directory):
    with opened(None, on_error="skip", skip_budget_share=1.0) as dataset:
        yield dataset


def opened(source, **options):
    return rayloader.RankDataset(source, **{"batch_size": 2, "rank": 0, "world_size": 1, **options})


def lent(lender, **options):
    """A new data set that reads with an open one's reader; the newest is the one that may."""
    dataset = rayloader.RankDataset(
        lender._loader.catalog,
        **{"rank": 0, "world_size": 1, "ordered": lender.options.ordered,
           "on_error": lender.options.on_error, **options},
    )  # fmt: skip
    ours, theirs = dataset._loader, lender._loader
    ours._remote, ours._state = theirs._remote, theirs._state
    ours._generation = next(_GENERATIONS) * 1_000_000
    return dataset


def numbers(batches):
    return [[int(key[-2:]) for key in batch.keys] for batch in batches]


def flat(batches):
    return [number for batch in batches for number in batch]


def stream(dataset, epoch, files=None, steps=None):
    dataset.set_epoch(epoch, files, steps)
    return numbers(dataset)


def states_of(dataset):
    """The state after each batch, until the epoch is exhausted."""
    return [through_storage(dataset.state_dict()) for _ in dataset]


def through_storage(state):
    """As checkpoints do: pickled, or written as text."""
    assert json.loads(json.dumps(state)) == state
    return pickle.loads(pickle.dumps(state))


cuts = st.fixed_dictionaries(
    {
        "world_size": st.integers(1, 4),
        "batch_size": st.integers(1, 6),
        "uneven": st.sampled_from(["drop", "pad"]),
        "drop_last": st.booleans(),
    }
)
orders = st.fixed_dictionaries({"seed": st.integers(0, 99), "shuffle": st.booleans()})
laws = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@laws
@given(cut=cuts, order=orders, epoch=st.integers(0, 9), data=st.data())
def test_the_same_ranks_read_exactly_the_rest_from_every_position(reader, cut, order, epoch, data):
    rank = data.draw(st.integers(0, cut["world_size"] - 1))
    dataset = lent(reader, rank=rank, **cut, **order)
    expected = stream(dataset, epoch)
    dataset.set_epoch(epoch)
    states = [dataset.state_dict()]
    states += [dataset.state_dict() for _ in dataset]
    for step, state in enumerate(states):
        resumed = lent(reader, rank=rank, **cut, **order)
        resumed.load_state_dict(through_storage(state))
        assert len(resumed) == len(expected) - step
        assert resumed.state_dict() == state
        assert numbers(resumed) == expected[step:]
        assert resumed.state_dict()["epoch"] == epoch + 1
        assert resumed.state_dict()["step"] == 0


@laws
@given(old=cuts, new=cuts, order=orders)
def test_any_number_of_ranks_reads_the_rest_from_every_position(reader, old, new, order):
    def of(cut, state=None):
        """The batches of every rank."""
        ranks = [lent(reader, rank=r, **cut, **order) for r in range(cut["world_size"])]
        for dataset in ranks:
            dataset.set_epoch(5) if state is None else dataset.load_state_dict(state)
        return [numbers(dataset) for dataset in ranks]

    streams = of(old)
    dataset = lent(reader, **old, **order)
    dataset.set_epoch(5)
    for step, state in enumerate(states_of(dataset), 1):
        seen = flat(flat(stream[:step] for stream in streams))
        rest = of(new, state)
        assert len({len(batches) for batches in rest}) == 1, "equal steps"
        got = flat(flat(rest))
        if new == old:
            assert rest == [stream[step:] for stream in streams]
        elif step == len(streams[0]):
            assert got == []
        else:
            assert_is_the_rest(seen, got, new)


def assert_is_the_rest(seen, got, cut):
    left = collections.Counter(range(FILES)) - collections.Counter(seen)
    ranks, size = cut["world_size"], cut["batch_size"]
    share = left.total() // ranks if cut["uneven"] == "drop" else -(-left.total() // ranks)
    share -= share % size if cut["drop_last"] else 0
    assert len(got) == share * ranks
    if cut["uneven"] == "drop":
        assert collections.Counter(got) <= left
    elif not cut["drop_last"]:
        assert set(left) <= set(got)
        assert (collections.Counter(got) - left).total() == len(got) - left.total()


def test_a_position_may_change_ranks_again_and_again(reader):
    seen, state = [], None
    for world, size in [(3, 2), (2, 3), (1, 1), (2, 1), (4, 1)]:
        saved = []
        for rank in range(world):
            dataset = lent(reader, rank=rank, world_size=world, batch_size=size)
            dataset.set_epoch(1) if state is None else dataset.load_state_dict(state)
            seen += numbers([next(iter(dataset))])[0]
            saved.append(dataset.state_dict())
        assert all(one == saved[0] for one in saved), "any rank's state resumes all"
        state = saved[0]
    assert len(seen) == len(set(seen)) == 6 + 6 + 1 + 2 + 4
    last = lent(reader, batch_size=4)
    last.load_state_dict(state)
    assert sorted(seen + flat(numbers(last))) == list(range(FILES))


@laws
@given(
    files=st.lists(st.integers(0, FILES - 1), min_size=1, max_size=20),
    size=st.integers(1, 5),
    drop_last=st.booleans(),
    fixed=st.none() | st.integers(0, 12),
)
def test_an_explicit_list_is_resumed_with_the_same_list(
    reader, directory, files, size, drop_last, fixed
):
    paths = [directory / f"{number:02}" for number in files]
    options = {"batch_size": size, "drop_last": drop_last, "uneven": "pad"}
    expected = stream(lent(reader, **options), 2, paths, fixed)
    dataset = lent(reader, **options)
    dataset.set_epoch(2, paths, fixed)
    for step, state in enumerate(states_of(dataset), 1):
        resumed = lent(reader, **options)
        resumed.load_state_dict(state)
        assert resumed.state_dict() == {**state, "position": resumed.state_dict()["position"]}
        with pytest.raises(errors.StateMismatch, match="explicit list"):
            next(iter(resumed))
        other = [*paths, paths[0]]
        with pytest.raises(errors.StateMismatch, match="digest"):
            resumed.set_epoch(2, other, fixed)
        if step > 1:
            with pytest.raises(errors.StateMismatch, match=f"step {step}.*only 1"):
                resumed.set_epoch(2, paths, 1)
        assert stream(resumed, 2, paths, fixed) == expected[step:]


@laws
@given(size=st.integers(1, 4), stop=st.integers(1, 23), seed=st.integers(0, 9))
def test_without_order_the_rest_is_what_has_not_come(hasty, size, stop, seed):
    dataset = lent(hasty, batch_size=size, seed=seed)
    dataset.set_epoch(3)
    got = numbers(itertools.islice(dataset, min(stop, len(dataset))))
    state = through_storage(dataset.state_dict())
    resumed = lent(hasty, batch_size=size, seed=seed)
    resumed.load_state_dict(state)
    rest = numbers(resumed)
    assert sorted(flat(got + rest)) == list(range(FILES))
    if state["delivered"]:
        for name, value in {"batch_size": size + 1, "drop_last": True, "uneven": "pad"}.items():
            other = lent(hasty, **{"batch_size": size, "seed": seed, name: value})
            with pytest.raises(errors.StateMismatch, match=name):
                other.load_state_dict(state)


def test_steps_that_came_out_of_order_are_not_read_again(hasty):
    expected = stream(lent(hasty, batch_size=2, seed=4), 0)
    dataset = lent(hasty, batch_size=2, seed=4)
    state = {**dataset.state_dict(), "step": 2, "delivered": [4, 7]}
    dataset.load_state_dict(state)
    assert len(dataset) == 12 - 4
    plan = dataset._loader._share.plan(dataset._loader._next)
    wanted = [plan.batch(step).tolist() for step in (2, 3, 5, 6, 8, 9, 10, 11)]
    assert sorted(numbers(dataset)) == sorted(wanted)
    assert sorted(flat(expected)) == list(range(FILES))


def test_skipped_samples_shorten_batches_and_move_no_position(forgiving, directory):
    paths = [directory / f"{n:02}" if n % 3 else directory / f"gone {n:02}" for n in range(FILES)]
    options = {"batch_size": 4, "skip_budget_share": 1.0}
    expected = stream(lent(forgiving, **options), 0, paths)
    assert flat(expected) == [number for number in range(FILES) if number % 3]
    assert len(expected) == 6
    dataset = lent(forgiving, **options)
    dataset.set_epoch(0, paths)
    for step, state in enumerate(states_of(dataset), 1):
        resumed = lent(forgiving, **options)
        resumed.load_state_dict(state)
        assert stream(resumed, 0, paths) == expected[step:]


def test_the_state_after_next_says_that_its_batch_has_been_given(reader):
    dataset = lent(reader, batch_size=4)
    batches = iter(dataset)
    for step in range(1, 7):
        next(batches)
        assert dataset.state_dict()["step"] == step
        assert dataset.state_dict()["position"] == min(4 * step, FILES)
    assert next(batches, None) is None
    assert (dataset.state_dict()["epoch"], dataset.state_dict()["step"]) == (1, 0)


def test_another_epoch_than_the_loaded_one_begins_at_its_start(reader):
    expected = stream(lent(reader, batch_size=4), 6)
    dataset = lent(reader, batch_size=4)
    dataset.set_epoch(6)
    next(iter(dataset))
    state = dataset.state_dict()
    for epoch, first in [(6, 1), (7, 0)]:
        resumed = lent(reader, batch_size=4)
        resumed.load_state_dict(state)
        resumed.set_epoch(epoch)
        assert len(resumed) == 6 - first
        if epoch == 6:
            assert numbers(resumed) == expected[1:]


@pytest.mark.parametrize(
    ("name", "options", "source"),
    [
        ("seed", {"seed": 8}, None),
        ("shuffle", {"shuffle": False}, None),
        ("catalog", {}, ["/elsewhere"]),
    ],
)
def test_a_state_of_another_run_is_refused_by_name(reader, name, options, source):
    state = lent(reader, batch_size=2, seed=1).state_dict()
    if source is None:
        other = lent(reader, batch_size=2, **{"seed": 1, **options})
    else:
        other = opened(source, seed=1)
    before = other.state_dict()
    with pytest.raises(errors.StateMismatch, match=name):
        other.load_state_dict(state)
    assert other.state_dict() == before


# Inside torchdata's loader


# What torchdata 0.11 calls in torch 2.13.
vital = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


def loader_of(reader, **options):
    dataset = lent(reader, **{"batch_size": 4, "seed": 9, **options})
    return StatefulDataLoader(dataset, batch_size=None, num_workers=0)


@vital
def test_a_stateful_data_loader_goes_on_from_every_position(reader):
    expected = stream(lent(reader, batch_size=4, seed=9), 0)
    following = stream(lent(reader, batch_size=4, seed=9), 1)
    for stop in range(1, len(expected) + 1):
        loader = loader_of(reader)
        batches = iter(loader)
        assert numbers(itertools.islice(batches, stop)) == expected[:stop]
        state = pickle.loads(pickle.dumps(loader.state_dict()))
        again = loader_of(reader)
        again.load_state_dict(state)
        assert numbers(again) == expected[stop:]
        assert numbers(again) == following


@vital
def test_a_stateful_data_loader_goes_on_from_the_end_of_an_epoch(reader):
    following = stream(lent(reader, batch_size=4, seed=9), 1)
    loader = loader_of(reader)
    list(loader)
    again = loader_of(reader)
    again.load_state_dict(pickle.loads(pickle.dumps(loader.state_dict())))
    assert numbers(again) == following
