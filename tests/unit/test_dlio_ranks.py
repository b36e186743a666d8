"""Ranks that agree: what one cannot do, none does."""

import os
import threading
from types import SimpleNamespace

import pytest
from rayloader_dlio.ranks import ExitWatch, Ranks

from rayloader import OptionError, RayloaderError
from tests.unit.dlio_mpi import World


def on_all(world, act):
    """What ``act(ranks)`` returns or raises on every rank, each in a thread of its own."""
    outcomes = [None] * world.size

    def run(rank):
        try:
            outcomes[rank] = act(Ranks(world.mpi(rank)))
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "a rank waits for ever"
    return outcomes


def test_ranks_of_a_node_find_each_other_and_share_a_secret_name_that_no_other_node_has():
    found = on_all(World(nodes=[2, 3]), lambda ranks: (ranks.launch, ranks.run))
    places, runs = zip(*found, strict=True)
    assert len(set(runs)) == 1
    assert [(place.rank, place.world_size) for place in places] == [(n, 5) for n in range(5)]
    assert [place.local_rank for place in places] == [0, 1, 0, 1, 2]
    assert [place.local_world_size for place in places] == [2, 2, 3, 3, 3]
    names = [place.run_id for place in places]
    assert names[0] == names[1] != names[2] == names[3] == names[4]
    assert set(places[0].node_cpus) == os.sched_getaffinity(0)


def test_two_runs_have_different_names():
    names = {on_all(World(nodes=[1]), lambda ranks: ranks.run)[0] for _ in range(3)}
    assert len(names) == 3


def test_what_all_may_know_of_a_run_is_one_name_that_tells_nothing_of_the_secret_one():
    found = on_all(World(nodes=[2, 1]), lambda ranks: (ranks.launch.run_name, ranks.run))
    (shown,), (secret,) = map(set, zip(*found, strict=True))
    assert shown.startswith("dlio ")
    assert shown.removeprefix("dlio ") not in secret


def test_a_failure_of_one_rank_is_the_error_of_all():
    def act(ranks):
        with ranks.together():
            if ranks.rank in (1, 2):
                raise OptionError(f"not with rank {ranks.rank}")

    errors = on_all(World(nodes=[4]), act)
    assert {type(error) for error in errors} == {OptionError}
    assert {str(error) for error in errors} == {"not with rank 1"}
    assert errors[3].__notes__ == ["(of rank 1)"]


def test_an_error_that_does_not_travel_is_told_in_words():
    def act(ranks):
        with ranks.together():
            if ranks.rank == 0:
                raise ValueError(threading.Lock())

    own, other = on_all(World(nodes=[2]), act)
    assert type(own) is ValueError
    assert isinstance(other, RayloaderError)
    assert "ValueError" in str(other)


def test_figures_are_agreed_on():
    def act(ranks):
        with ranks.together():
            pass
        first = ranks.from_first(f"rank {ranks.rank}")
        return ranks.least(ranks.rank + 5, 9 - ranks.rank), ranks.total(ranks.rank), first

    assert on_all(World(nodes=[3]), act) == [([5, 7], 3, "rank 0")] * 3


def test_an_error_is_told_before_all_end(capsys):
    world = World(nodes=[2])

    def act(ranks):
        error = OptionError("it cannot be read")
        error.add_note("step 3")
        if ranks.rank == 1:
            ranks.abort(error)

    on_all(world, act)
    assert world.aborted == [1]
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["rayloader: rank 1 ends all 2 ranks: it cannot be read", "  step 3"]


def test_one_rank_alone_has_nobody_to_take_along():
    world = World(nodes=[1])
    on_all(world, lambda ranks: ranks.abort(ValueError("x")))
    on_all(world, lambda ranks: ranks.abort_at_exit())
    assert world.aborted == []


@pytest.mark.parametrize(("finalized", "aborted"), [(False, [0]), (True, [])])
def test_a_rank_that_exits_before_mpi_is_finalized_ends_all(finalized, aborted):
    world = World(nodes=[2])
    world.finalized = finalized
    on_all(world, lambda ranks: ranks.abort_at_exit() if ranks.rank == 0 else None)
    assert world.aborted == aborted
    assert isinstance(world.mpi(0), SimpleNamespace)


@pytest.mark.parametrize(
    ("initialized", "finalized", "nodes", "aborted"),
    [
        (True, False, [2], [0]),
        (False, False, [2], []),
        (True, True, [2], []),
        (True, False, [1], []),
    ],
)
def test_a_rank_that_fails_before_there_is_a_session_ends_all(
    initialized, finalized, nodes, aborted, capsys
):
    world = World(nodes=nodes)
    world.finalized = finalized
    mpi = world.mpi(0)
    mpi.Is_initialized = lambda: initialized
    watch = ExitWatch(mpi)
    watch.at_exit()
    watch.end()
    assert world.aborted == aborted
    assert ("rank 0 exits before the run's end" in capsys.readouterr().err) == bool(aborted)
