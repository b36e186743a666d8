"""Laws of the plan: who reads what, in which order, in which batches."""

import dataclasses
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayloader.errors import EmptyCatalog, OptionError
from rayloader.plan import EpochPlan, ListPlan, Shard


@st.composite
def epochs(draw, max_entries=200, starts=True):
    """Arguments of an epoch that is allowed, for all ranks."""
    ranks = draw(st.integers(1, 7))
    uneven = draw(st.sampled_from(["drop", "pad"]))
    entries = draw(st.integers(ranks if uneven == "drop" else 1, max_entries))
    return {
        "ranks": ranks,
        "entries": entries,
        "batch_size": draw(st.integers(1, 12)),
        "epoch": draw(st.integers(0, 3)),
        "seed": draw(st.integers(-5, 5)),
        "shuffle": draw(st.booleans()),
        "uneven": uneven,
        "drop_last": draw(st.booleans()),
        "start": draw(st.integers(0, entries)) if starts else 0,
    }


def ranks_of(ranks, **arguments):
    return [EpochPlan(shard=Shard(rank, ranks), **arguments) for rank in range(ranks)]


def joined(batches):
    batches = list(batches)
    return np.concatenate(batches) if batches else np.zeros(0, np.int64)


def order_of(plan):
    """The whole epoch's entries by position, as one rank sees them one by one."""
    whole = dataclasses.replace(plan, shard=Shard(0, 1), batch_size=1, start=0, drop_last=False)
    return joined(whole.batches())


def read_by_all(plans, first=0, stop=None):
    """What all ranks read, in the order of positions: step by step, rank by rank."""
    return joined(
        plan.batch(step)
        for step in range(first, plans[0].steps if stop is None else stop)
        for plan in plans
    )


# Equal steps


@given(epochs())
def test_every_rank_has_the_same_steps_and_the_same_batch_lengths(arguments):
    plans = ranks_of(**arguments)
    lengths = [[len(batch) for batch in plan.batches()] for plan in plans]
    assert all(each == lengths[0] for each in lengths)
    assert all(plan.steps == len(lengths[0]) for plan in plans)
    assert all(plan.samples == sum(lengths[0]) for plan in plans)


@given(epochs())
def test_only_the_last_batch_may_be_short_and_none_is_under_drop_last(arguments):
    plan = ranks_of(**arguments)[0]
    lengths = [len(batch) for batch in plan.batches()]
    full = arguments["batch_size"]
    assert all(length == full for length in lengths[:-1])
    assert all(0 < length <= full for length in lengths)
    if arguments["drop_last"]:
        assert all(length == full for length in lengths)


@given(epochs())
def test_samples_per_rank_are_the_rest_divided_by_the_ranks(arguments):
    plan = ranks_of(**arguments)[0]
    rest, ranks, size = (
        arguments["entries"] - arguments["start"],
        arguments["ranks"],
        arguments["batch_size"],
    )
    share = rest // ranks if arguments["uneven"] == "drop" else (rest + ranks - 1) // ranks
    assert plan.samples == (share // size * size if arguments["drop_last"] else share)


# Every file exactly once


@given(epochs())
def test_under_drop_shares_are_disjoint_and_miss_less_than_one_sample_per_rank(arguments):
    arguments |= {"uneven": "drop", "drop_last": False}
    if arguments["entries"] < arguments["ranks"]:
        arguments["entries"] = arguments["ranks"]
    plans = ranks_of(**arguments)
    read = np.concatenate([joined(plan.batches()) for plan in plans])
    rest = order_of(plans[0])[arguments["start"] :]
    assert len(np.unique(read)) == len(read)
    assert set(read) <= set(rest)
    assert len(rest) - len(read) == len(rest) % arguments["ranks"]


@given(epochs())
def test_under_pad_the_union_is_complete_and_less_than_one_sample_per_rank_is_read_twice(
    arguments,
):
    arguments |= {"uneven": "pad", "drop_last": False}
    plans = ranks_of(**arguments)
    order = order_of(plans[0])
    read = read_by_all(plans)
    rest = arguments["entries"] - arguments["start"]
    assert list(read[:rest]) == list(order[arguments["start"] :])
    extra = read[rest:]
    assert len(extra) == -rest % arguments["ranks"]
    assert list(extra) == list(np.resize(order, len(extra)))


@given(epochs())
def test_all_ranks_together_walk_the_epoch_in_the_order_of_positions(arguments):
    """This fixes where each batch begins: batch k of rank r at start + (k * W + r) * B."""
    arguments |= {"uneven": "drop", "drop_last": False}
    arguments["entries"] = max(arguments["entries"], arguments["ranks"])
    plans = ranks_of(**arguments)
    read = read_by_all(plans)
    order = order_of(plans[0])
    assert list(read) == list(order[arguments["start"] :][: len(read)])


@given(epochs(), st.data())
def test_a_batch_is_the_stated_window_of_positions(arguments, data):
    arguments |= {"shuffle": False, "uneven": "drop"}
    arguments["entries"] = max(arguments["entries"], arguments["ranks"])
    plans = ranks_of(**arguments)
    if plans[0].steps:
        rank = data.draw(st.integers(0, arguments["ranks"] - 1))
        step = data.draw(st.integers(0, plans[0].steps - 1))
        size, ranks = arguments["batch_size"], arguments["ranks"]
        share = (arguments["entries"] - arguments["start"]) // ranks
        full, tail = divmod(share, size)
        begin, length = (
            (arguments["start"] + (step * ranks + rank) * size, size)
            if step < full
            else (arguments["start"] + full * ranks * size + rank * tail, tail)
        )
        assert list(plans[rank].batch(step)) == list(range(begin, begin + length))


def test_three_ranks_share_fourteen_entries_as_written_here():
    drop = ranks_of(3, entries=14, batch_size=3, shuffle=False)
    assert [[list(batch) for batch in plan.batches()] for plan in drop] == [
        [[0, 1, 2], [9]],
        [[3, 4, 5], [10]],
        [[6, 7, 8], [11]],  # 12 and 13 are dropped
    ]
    pad = ranks_of(3, entries=14, batch_size=3, shuffle=False, uneven="pad")
    assert [[list(batch) for batch in plan.batches()] for plan in pad] == [
        [[0, 1, 2], [9, 10]],
        [[3, 4, 5], [11, 12]],
        [[6, 7, 8], [13, 0]],
    ]


def test_more_ranks_than_entries_under_pad_wrap_as_often_as_needed():
    plans = ranks_of(7, entries=3, batch_size=2, shuffle=False, uneven="pad")
    assert [list(plan.batch(0)) for plan in plans] == [[0], [1], [2], [0], [1], [2], [0]]


# The order


@given(epochs(starts=False), st.integers(1, 7), st.integers(1, 12))
def test_the_order_does_not_depend_on_ranks_or_batch_size(arguments, ranks, batch_size):
    arguments |= {"uneven": "pad", "drop_last": False}
    here = read_by_all(ranks_of(**arguments))[: arguments["entries"]]
    there = read_by_all(ranks_of(**(arguments | {"ranks": ranks, "batch_size": batch_size})))
    assert list(here) == list(there[: arguments["entries"]])


@given(st.integers(0, 100), st.integers(20, 300), st.integers(1, 5))
def test_another_epoch_and_another_seed_give_another_order(epoch, entries, later):
    def order(epoch, seed):
        return list(order_of(EpochPlan(entries, Shard(), 1, epoch=epoch, seed=seed)))

    assert order(epoch, 7) == order(epoch, 7)
    assert sorted(order(epoch, 7)) == list(range(entries))
    assert order(epoch, 7) != order(epoch + later, 7)
    assert order(epoch, 7) != order(epoch, 7 + later)


def test_without_shuffle_the_order_is_the_catalogs_in_every_epoch():
    for epoch in range(3):
        plan = EpochPlan(10, Shard(), 3, epoch=epoch, shuffle=False)
        assert list(joined(plan.batches())) == list(range(10))


# Resuming


@settings(max_examples=60)
@given(epochs(max_entries=60), st.integers(1, 5), st.integers(1, 9))
def test_a_run_cut_anew_after_any_step_reads_exactly_the_rest(arguments, ranks, batch_size):
    arguments |= {"drop_last": False}
    arguments["entries"] = max(arguments["entries"], ranks)  # fewer are an error at position 0
    plans = ranks_of(**arguments)
    order = order_of(plans[0])
    for step in range(plans[0].steps + 1):
        position = plans[0].position(step)
        anew = ranks_of(**(arguments | _cut(ranks, batch_size, position)))
        before = read_by_all(plans, stop=step)[: arguments["entries"] - arguments["start"]]
        rest = len(order) - position
        after = read_by_all(anew)
        if step < plans[0].steps:
            assert list(before) == list(order[arguments["start"] : position])
        if arguments["uneven"] == "drop":
            assert list(after) == list(order[position:][: rest // ranks * ranks])
        else:
            assert list(after[:rest]) == list(order[position:])
            assert len(after) == -(-rest // ranks) * ranks


def _cut(ranks, batch_size, start):
    return {"ranks": ranks, "batch_size": batch_size, "start": start}


@given(epochs())
def test_the_position_after_the_last_step_is_the_end_of_the_epoch(arguments):
    plan = ranks_of(**arguments)[0]
    assert plan.position(plan.steps) == arguments["entries"]
    rest = dataclasses.replace(plan, start=plan.position(plan.steps))
    assert rest.steps == rest.samples == 0
    assert list(rest.batches()) == []
    positions = [plan.position(step) for step in range(plan.steps + 1)]
    assert positions == sorted(set(positions))  # every step moves forward


@given(epochs())
def test_cutting_at_the_same_ranks_and_batch_size_gives_the_same_remaining_batches(arguments):
    arguments |= {"uneven": "drop"}
    arguments["entries"] = max(arguments["entries"], arguments["ranks"])
    plans = ranks_of(**arguments)
    for step in range(plans[0].steps):
        for plan in plans:
            rest = dataclasses.replace(plan, start=plan.position(step))
            assert [list(b) for b in rest.batches()] == [list(b) for b in plan.batches(step)]


# The ways to ask


@given(epochs(max_entries=400), st.data())
def test_batches_in_blocks_are_the_batches_one_by_one(arguments, data):
    plan = ranks_of(**arguments)[-1]
    first = data.draw(st.integers(0, plan.steps))
    stop = data.draw(st.integers(first, plan.steps))
    at_once = [list(batch) for batch in plan.batches(first, stop)]
    assert at_once == [list(plan.batch(step)) for step in range(first, stop)]


@pytest.mark.parametrize("batch_size", [1, 7, 1000, 40_000])
def test_blocks_of_a_large_epoch_join_without_a_seam(batch_size):
    plan = EpochPlan(100_003, Shard(1, 2), batch_size, shuffle=False)
    read = joined(plan.batches())
    other = joined(dataclasses.replace(plan, shard=Shard(0, 2)).batches())
    assert read.dtype == np.int64
    assert len(read) == plan.samples == 50_001
    assert len(np.union1d(read, other)) == 100_002
    for step in (0, plan.steps // 2, plan.steps - 1):
        assert list(plan.batch(step)) == list(next(plan.batches(step)))


@pytest.mark.parametrize(
    "plan", [EpochPlan(10, Shard(), 3), ListPlan(10, 3), ListPlan(10, 3, 2)], ids=repr
)
def test_a_step_outside_the_plan_is_an_index_error_at_the_call(plan):
    for wrong in (-1, plan.steps):
        with pytest.raises(IndexError, match=f"plan of {plan.steps} steps"):
            plan.batch(wrong)
    for first, stop in ((-1, 1), (0, plan.steps + 1), (2, 1)):
        with pytest.raises(IndexError, match="not in this plan"):
            plan.batches(first, stop)
    for wrong in (-1, plan.steps + 1):
        with pytest.raises(IndexError, match="not in this plan"):
            plan.position(wrong)


def test_a_used_plan_travels_as_a_few_hundred_bytes_and_means_the_same():
    plan = EpochPlan(10**6, Shard(1, 3), 24, epoch=4, seed=9)
    before = list(plan.batch(5))
    tiny = EpochPlan(4000, Shard(), 24)
    tiny.batch(0)  # holds a table of 4000 entries now
    for each in (plan, tiny, ListPlan(10**6, 24, fixed_steps=5)):
        packed = pickle.dumps(each)
        assert len(packed) < 500
        assert pickle.loads(packed) == each
    assert list(pickle.loads(pickle.dumps(plan)).batch(5)) == before


# Explicit lists


@given(st.integers(1, 60), st.integers(1, 9), st.booleans())
def test_a_list_is_read_in_its_order(entries, batch_size, drop_last):
    plan = ListPlan(entries, batch_size, drop_last=drop_last)
    samples = entries // batch_size * batch_size if drop_last else entries
    assert list(joined(plan.batches())) == list(range(samples))
    assert plan.samples == samples
    assert plan.steps == len(list(plan.batches()))


@given(st.integers(1, 60), st.integers(1, 9), st.booleans(), st.integers(0, 12), st.data())
def test_fixed_steps_are_kept_whatever_the_length(entries, batch_size, drop_last, steps, data):
    uneven = data.draw(st.sampled_from(["drop", "pad"]))
    given_batches = ListPlan(entries, batch_size, drop_last=drop_last).steps
    arguments = (entries, batch_size, steps, uneven, drop_last)
    if uneven == "drop" and given_batches < steps:
        with pytest.raises(OptionError, match=rf"steps={steps}.* {entries} files"):
            ListPlan(*arguments)
        return
    plan = ListPlan(*arguments)
    batches = list(plan.batches())
    assert plan.steps == len(batches) == steps
    assert plan.samples == sum(map(len, batches))
    assert list(joined(batches)) == [place % entries for place in range(plan.samples)]
    if given_batches < steps:
        assert all(len(batch) == batch_size for batch in batches)  # padded until full
    else:
        assert plan.samples <= entries


def test_a_longer_list_is_cut_and_the_last_of_its_batches_is_full():
    assert [list(b) for b in ListPlan(10, 3, fixed_steps=2).batches()] == [[0, 1, 2], [3, 4, 5]]


def test_a_short_list_is_an_error_under_drop_that_names_both_figures():
    with pytest.raises(OptionError, match=r"steps=5: a list of 10 files gives 4 batches of 3;"):
        ListPlan(10, 3, fixed_steps=5)
    with pytest.raises(OptionError, match=r"steps=4.* gives 3 batches of 3 with drop_last"):
        ListPlan(10, 3, fixed_steps=4, drop_last=True)
    assert ListPlan(10, 3, fixed_steps=4).samples == 10


@given(st.integers(1, 40), st.integers(1, 9), st.booleans())
def test_the_position_in_a_list_counts_its_samples(entries, batch_size, drop_last):
    plan = ListPlan(entries, batch_size, drop_last=drop_last)
    for step in range(plan.steps):
        assert plan.position(step) == len(joined(plan.batches(0, step)))
    assert plan.position(plan.steps) == entries


# Mistakes


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Shard(2, 2), OptionError, r"rank=2: .*from 0 to 1"),
        (lambda: Shard(-1, 2), OptionError, "rank=-1"),
        (lambda: Shard(0, 0), OptionError, "world_size=0"),
        (lambda: Shard(0, True), OptionError, "world_size=True"),
        (lambda: Shard(0.0, 1), OptionError, "rank=0.0"),
        (lambda: EpochPlan(10, Shard(), 0), OptionError, "batch_size=0"),
        (lambda: EpochPlan(10, Shard(), 2.5), OptionError, "batch_size=2.5"),
        (lambda: EpochPlan(-1, Shard(), 1), OptionError, "entries=-1"),
        (lambda: EpochPlan(1 << 63, Shard(), 1), OptionError, "entries="),
        (lambda: EpochPlan(10, Shard(), 1, epoch=-1), OptionError, "epoch=-1"),
        (lambda: EpochPlan(10, Shard(), 1, seed="7"), OptionError, "seed='7'"),
        (lambda: EpochPlan(10, Shard(), 1, start=11), OptionError, "start=11.* position 10"),
        (lambda: EpochPlan(10, Shard(), 1, start=-1), OptionError, "start=-1"),
        (lambda: EpochPlan(10, Shard(), 1, uneven="cut"), OptionError, "uneven='cut'"),
        (lambda: EpochPlan(0, Shard(), 1), EmptyCatalog, "no entries"),
        (lambda: EpochPlan(0, Shard(), 1, uneven="pad"), EmptyCatalog, "no entries"),
        (lambda: EpochPlan(3, Shard(0, 4), 1), EmptyCatalog, "3 entries .* 4 ranks"),
        (lambda: ListPlan(10, 0), OptionError, "batch_size=0"),
        (lambda: ListPlan(10, 1, fixed_steps=-1), OptionError, "fixed_steps=-1"),
        (lambda: ListPlan(10, 1, uneven="no"), OptionError, "uneven='no'"),
        (lambda: ListPlan(0, 1), EmptyCatalog, "list of files is empty"),
        (lambda: ListPlan(0, 1, fixed_steps=2, uneven="pad"), EmptyCatalog, "empty"),
    ],
)
def test_a_wrong_argument_is_named(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_a_rest_with_fewer_entries_than_ranks_has_no_steps_under_drop():
    assert EpochPlan(10, Shard(0, 4), 1, start=7).steps == 0
    assert EpochPlan(10, Shard(0, 4), 1, start=7, uneven="pad").steps == 1
    assert EpochPlan(6, Shard(0, 8), 1, start=4).steps == 0  # goes on with more ranks than entries


def test_numpy_integers_are_taken_and_become_plain_ones():
    plan = EpochPlan(np.int64(10), Shard(np.int32(1), np.int64(2)), np.uint8(3), seed=np.int64(2))
    assert plan == EpochPlan(10, Shard(1, 2), 3, seed=2)
    assert type(plan.steps) is int
    assert type(plan.position(1)) is int


def test_an_empty_list_with_no_steps_is_allowed():
    assert list(ListPlan(0, 4, fixed_steps=0).batches()) == []
