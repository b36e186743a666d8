"""A Fleet's arithmetic: pieces that are cut and dealt out anew cover the epoch once."""

import threading
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayloader.catalog import Catalog
from rayloader.config import Options
from rayloader.errors import OptionError, PlacementFailed
from rayloader.experiment.grid import Grid
from rayloader.fleet.consumer import SharedCatalog, Turns
from rayloader.fleet.crew import _least
from rayloader.fleet.epoch import require_ordered
from rayloader.fleet.fleet import Fleet
from rayloader.fleet.work import Piece, left_over
from rayloader.plan import EpochPlan, Shard


def read_by_all(entries, options, start, ranks, stop):
    """What all ranks read of a cut, up to step ``stop`` or (``None``) with what is left over."""
    seen, plans = [], []
    for rank in range(ranks):
        plan = Piece(3, Shard(rank, ranks), start).plan(entries, options)
        plans.append(plan)
        seen += [entry for batch in plan.batches(0, stop) for entry in batch]
    if stop is None and (rest := left_over(plans[0])):
        tail = Piece(3, Shard(0, 1), entries - rest).plan(entries, options)
        seen += [entry for batch in tail.batches() for entry in batch]
    return seen, plans[0]


@given(st.data())
def test_however_often_the_ranks_change_each_sample_is_read_once(data):
    entries = data.draw(st.integers(1, 200), "entries")
    options = Options(batch_size=data.draw(st.integers(1, 9), "batch_size"))
    seen, start = [], 0
    for _ in range(data.draw(st.integers(0, 4), "changes")):
        ranks = data.draw(st.integers(1, min(8, entries)), "ranks")
        steps = Piece(3, Shard(0, ranks), start).plan(entries, options).steps
        if not steps:
            break
        stop = data.draw(st.integers(0, steps - 1), "stop")
        read, plan = read_by_all(entries, options, start, ranks, stop)
        seen += read
        start = plan.position(stop)
        assert start == plan.start + stop * ranks * options.batch_size
    read, _ = read_by_all(entries, options, start, data.draw(st.integers(1, min(8, entries))), None)
    assert sorted(seen + read) == list(range(entries))


@pytest.mark.parametrize("how", [{"uneven": "pad"}, {"drop_last": True}])
def test_nothing_is_left_over_where_the_plan_is_that_of_training(how):
    assert left_over(EpochPlan(11, Shard(0, 4), 2, **how)) == 0
    assert left_over(EpochPlan(11, Shard(0, 4), 2)) == 3


def test_a_held_rank_begins_no_step_and_goes_on_to_where_it_is_told():
    turns, taken = Turns(), []
    turns.begin(0, 5, None)
    assert turns.take()
    assert turns.cut(0) == 6
    reading = threading.Thread(target=lambda: taken.extend(iter(turns.take, False)))
    reading.start()
    reading.join(0.1)
    assert taken == []
    turns.until(0, 8)
    reading.join(5)
    assert taken == [True, True]


def test_a_call_that_overtakes_its_piece_waits_for_it():
    turns, answers = Turns(), []
    turns.begin(0, 0, None)
    asking = threading.Thread(target=lambda: answers.append(turns.cut(1)))
    asking.start()
    asking.join(0.1)
    assert answers == []
    turns.begin(1, 7, None)
    asking.join(5)
    assert answers == [7]


def test_ranks_are_spread_over_the_nodes():
    placed = []
    for _ in range(5):
        placed.append(_least(["a", "b"], Counter(placed)))
    assert placed == ["a", "b", "a", "b", "a"]
    with pytest.raises(PlacementFailed, match="no node"):
        _least([], Counter())


def test_out_of_order_there_is_no_step_to_cut_an_epoch_at():
    require_ordered(True, 4)
    with pytest.raises(OptionError, match="ranks=4: with ordered=False"):
        require_ordered(False, 4)


def test_a_grid_shows_itself_as_text_and_as_html():
    grid = Grid("a < b", ("<name", "files\nread"), (("x&y", "1"), ("all", "1")), {1}, ("note <",))
    assert grid.text().splitlines() == ["a < b", "     files", "name  read", "x&y      1",
                                        "all      1", "note <"]  # fmt: skip
    page = grid.html()
    for piece in ("a &lt; b", "x&amp;y", "files<br>read", "font-weight:bold", "note &lt;"):
        assert piece in page
    assert np.all([page.count(f"<{tag}>") == 0 for tag in ("script", "style")])


def test_a_consumer_gets_the_digest_with_the_catalog_and_does_not_compute_it(tmp_path):
    """A saved catalog keeps none; with 50 M names each rank would be busy for seconds."""
    saved = tmp_path / "saved.arrow"
    Catalog.of_files(["a", "b"]).save(saved)
    assert SharedCatalog(str(saved), "", None, "as the owner said").load().digest == (
        "as the owner said"
    )


def test_a_misspelt_attribute_of_a_fleet_is_an_error():
    fleet = Fleet("data", concurrency=8)
    with pytest.raises(AttributeError, match="concurency"):
        fleet.concurency = 3
    fleet.concurrency = 3
    assert fleet.concurrency == 3
    assert repr(fleet) == "Fleet(1 rank, concurrency 3, not started)"
