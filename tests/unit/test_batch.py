"""A batch alone: whatever way its samples lie, going through it gives what its indices give."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayloader.dataset import Batch, _Names


def lying(places, sizes):
    length = max((p + s for p, s in zip(places, sizes, strict=True)), default=0)
    data = torch.from_numpy(np.random.default_rng(length).integers(0, 256, length + 7, np.uint8))
    return data, Batch(data, places, sizes, _Names.known([str(p) for p in places]), 0, 0)


def check(places, sizes):
    data, batch = lying(places, sizes)
    samples = list(batch)
    assert len(samples) == len(batch) == len(places)
    for i, (place, size) in enumerate(zip(places, sizes, strict=True)):
        assert torch.equal(samples[i], data[place : place + size])
        assert torch.equal(batch[i], samples[i])
        assert size == 0 or samples[i].data_ptr() == data.data_ptr() + place, "a view, no copy"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), max_size=12))
def test_samples_in_any_order_and_even_overlapping(table):
    check([place for place, _ in table], [size for _, size in table])


@settings(max_examples=100, deadline=None)
@given(
    first=st.integers(0, 100),
    gaps=st.lists(st.sampled_from([0, 48]), min_size=1, max_size=12),
    size=st.integers(0, 100),
)
def test_samples_of_one_size_with_gaps_and_without(first, gaps, size):
    places, at = [], first
    for gap in gaps:
        places.append(at)
        at += size + gap
    check(places, [size] * len(places))
    check([first + i * (size + gaps[0]) for i in range(len(gaps))], [size] * len(gaps))
