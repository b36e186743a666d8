"""The permutation: a bijection, the same everywhere, and even."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayloader import plan
from rayloader.errors import OptionError
from rayloader.plan import SORTED_ENTRIES, Permutation

LARGE = 5001
"""Just above the sort: the smallest networks, where Feistel is weakest."""


def chi_square(counts):
    """Deviation from even counts, in standard deviations of the chi-square distribution."""
    counts = np.asarray(counts, float).ravel()
    expected = counts.sum() / len(counts)
    degrees = len(counts) - 1
    return (((counts - expected) ** 2 / expected).sum() - degrees) / math.sqrt(2 * degrees)


@pytest.mark.parametrize(
    "n", [1, 2, 3, 17, SORTED_ENTRIES - 1, SORTED_ENTRIES, SORTED_ENTRIES + 1, 5000, 65_536, 99_991]
)
@pytest.mark.parametrize("key", [(0, 0), (7, 3), (-1, 10**30)])
def test_every_entry_stands_at_exactly_one_position(n, key):
    entries = Permutation(n, *key)(np.arange(n))
    assert entries.dtype == np.int64
    assert np.array_equal(np.sort(entries), np.arange(n))


@given(st.integers(2, 1 << 62), st.integers(), st.integers(), st.data())
def test_any_size_maps_into_itself_without_collisions(n, seed, epoch, data):
    positions = data.draw(st.lists(st.integers(0, n - 1), unique=True, min_size=1, max_size=50))
    entries = Permutation(n, seed, epoch)(np.array(positions, np.int64))
    assert len(np.unique(entries)) == len(positions)
    assert 0 <= entries.min() <= entries.max() < n


@pytest.mark.parametrize("n", [1000, LARGE, 10**12])
def test_the_answer_does_not_depend_on_what_else_is_asked(n):
    order = Permutation(n, 5, 6)
    positions = np.random.default_rng(0).integers(0, n, (40, 30))
    at_once = order(positions)
    assert at_once.shape == positions.shape
    assert np.array_equal(order(positions[7]), at_once[7])
    assert np.array_equal(order(positions.T), at_once.T)
    assert np.array_equal(order(np.asfortranarray(positions)), at_once)
    assert int(order(np.int64(positions[3, 4]))) == at_once[3, 4]
    assert order(np.zeros(0, np.int64)).shape == (0,)


def test_the_order_is_the_same_on_every_machine_and_in_every_release():
    """Golden values. A saved position means something else when they change."""
    assert Permutation(8, 0, 0)(np.arange(8)).tolist() == [4, 3, 6, 5, 1, 2, 0, 7]
    assert Permutation(10**6, 7, 3)(np.arange(4)).tolist() == [251518, 722788, 56905, 482723]
    assert Permutation(10**15, -7, 3)(np.arange(3)).tolist() == [
        614305078486322,
        389413027704610,
        987621691204004,
    ]


def test_every_permutation_of_four_is_equally_likely():
    counts = dict.fromkeys(itertools.permutations(range(4)), 0)
    for seed in range(4800):
        counts[tuple(Permutation(4, seed, 1)(np.arange(4)).tolist())] += 1
    assert abs(chi_square(list(counts.values()))) < 4


@pytest.fixture(scope="module")
def many_orders():
    """int64 [seeds, LARGE]: whole orders under consecutive seeds, then consecutive epochs."""
    seeds = [(seed, 0) for seed in range(200)] + [(0, epoch) for epoch in range(1, 201)]
    return np.stack([Permutation(LARGE, *key)(np.arange(LARGE)) for key in seeds])


def test_every_position_gets_every_entry_equally_often(many_orders):
    """Regions of positions against regions of entries, over all keys together."""
    regions = 24
    at = np.arange(LARGE) * regions // LARGE
    counts = np.zeros((regions, regions))
    to = many_orders * regions // LARGE
    for order in to:
        np.add.at(counts, (at, order), 1)
    width = np.bincount(at)
    expected = np.outer(width, width) * len(many_orders) / LARGE
    statistic = ((counts - expected) ** 2 / expected).sum() * LARGE / (LARGE - 1)
    degrees = (regions - 1) ** 2
    assert abs(statistic - degrees) / math.sqrt(2 * degrees) < 4


def test_one_position_gets_every_entry_equally_often_over_the_keys(many_orders):
    for position in (0, 1, 70, 71, 72, LARGE // 2, LARGE - 1):
        counts = np.bincount(many_orders[:, position] * 20 // LARGE, minlength=20)
        assert abs(chi_square(counts)) < 4.5


@pytest.mark.parametrize("lag", [1, 2, 70, 71, 72, 142])
def test_neighbours_are_no_likelier_to_stay_neighbours(many_orders, lag):
    """Differences of entries at a fixed distance; 71 is the side of the network."""
    differences = (many_orders[:, lag:] - many_orders[:, :-lag]) % LARGE
    counts = np.bincount(differences.ravel() - 1, minlength=LARGE - 1)
    assert abs(chi_square(counts)) < 4.5
    assert abs(chi_square(counts.reshape(50, -1).sum(axis=1))) < 4.5


def test_two_keys_have_as_many_places_in_common_as_chance_gives(many_orders):
    same = int((many_orders[1:] == many_orders[:-1]).sum())
    expected = len(many_orders) - 1  # one fixed point per pair of permutations
    assert abs(same - expected) < 5 * math.sqrt(expected)


def test_these_tests_of_evenness_reject_a_network_of_four_rounds(monkeypatch):
    monkeypatch.setattr(plan, "ROUNDS", 4)
    orders = np.stack([Permutation(LARGE, seed, 0)(np.arange(LARGE)) for seed in range(400)])
    with pytest.raises(AssertionError):
        test_neighbours_are_no_likelier_to_stay_neighbours(orders, 71)
    with pytest.raises(AssertionError):
        test_neighbours_are_no_likelier_to_stay_neighbours(orders, 142)


@pytest.mark.parametrize("n", [10, LARGE])
def test_a_position_outside_is_an_index_error(n):
    for wrong in (-1, n):
        with pytest.raises(IndexError, match=f"from 0 to {n - 1}"):
            Permutation(n, 0, 0)(np.array([0, wrong]))


def test_more_entries_than_can_be_ordered_are_an_option_error():
    with pytest.raises(OptionError, match="entries"):
        Permutation((1 << 62) + 1, 0, 0)
