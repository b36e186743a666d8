import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayloader import arena
from rayloader.arena import HEADER_BYTES, Extent, Space
from rayloader.config import PAGE

SIZES = st.lists(st.integers(0, 3 * PAGE), min_size=0, max_size=12)


def taken_pages(extents):
    return [page for e in extents for page in range(e.start // PAGE, (e.start + e.length) // PAGE)]


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 6 * PAGE)), max_size=60))
def test_no_two_extents_share_a_page_and_nothing_is_lost(steps):
    space = Space(40 * PAGE)
    held: list[Extent] = []
    for give_back, amount in steps:
        if give_back and held:
            space.release(held.pop(amount % len(held)))
        elif (extent := space.reserve(amount)) is not None:
            assert extent.length >= amount
            held.append(extent)
        used = taken_pages(held)
        assert len(set(used)) == len(used)
        assert all(1 <= page < 40 for page in used)
        assert space.free == 39 * PAGE - len(used) * PAGE
    for extent in held:
        space.release(extent)
    assert space.reserve(39 * PAGE) == Extent(HEADER_BYTES, 39 * PAGE)


def test_the_lowest_free_bytes_are_used_first():
    space = Space(10 * PAGE)
    first, second = space.reserve(PAGE), space.reserve(PAGE)
    space.release(first)
    assert space.reserve(PAGE) == first
    assert second.start == first.start + PAGE


@given(st.lists(st.integers(1, 4), min_size=1, max_size=8), st.data())
def test_a_new_space_can_hold_what_an_old_one_gave(pages, data):
    old = Space(64 * PAGE)
    extents = [old.reserve(count * PAGE) for count in pages]
    kept = [e for e in extents if data.draw(st.booleans())]
    new = Space(64 * PAGE)
    for extent in data.draw(st.permutations(kept)):
        new.hold(extent)
    assert new.free == 63 * PAGE - sum(e.length for e in kept)
    for extent in kept:
        with pytest.raises(ValueError, match="not free"):
            new.hold(extent)
        new.release(extent)
    assert new.reserve(63 * PAGE) is not None


@given(SIZES, st.sampled_from([64, PAGE]))
def test_samples_of_a_batch_are_aligned_apart_and_behind_the_table(sizes, alignment):
    sizes = np.array(sizes, np.int64)
    space = Space(200 * PAGE)
    layout = arena.lay_out(sizes, alignment)
    room = arena.reserve_batch(space, layout)
    assert len(room.extents) == 1
    assert room.length == layout.length
    end = room.table_at + 24 * len(sizes)
    for place, size in zip(room.places, sizes, strict=True):
        if size:
            assert place % alignment == 0
            assert place >= end
            end = place + size
    assert end <= room.extents[0].start + room.length


def test_a_batch_lies_in_pieces_when_no_hole_is_large_enough():
    space = Space(11 * PAGE)
    blocks = [space.reserve(2 * PAGE) for _ in range(5)]
    for block in blocks[::2]:
        space.release(block)
    sizes = np.array([PAGE, 0, 2 * PAGE], np.int64)
    room = arena.reserve_batch(space, arena.lay_out(sizes, 64))
    assert len(room.extents) == 3
    recomputed = arena.pieces(room.table_at, room.places, sizes, 64)
    assert sorted(recomputed) == sorted(room.extents)


def test_a_full_arena_gives_nothing_and_keeps_what_it_had():
    space = Space(4 * PAGE)
    sizes = np.array([PAGE, PAGE, PAGE], np.int64)
    assert arena.reserve_batch(space, arena.lay_out(sizes, 64)) is None
    assert space.free == 3 * PAGE


@given(SIZES)
def test_a_table_survives_the_arena(sizes):
    sizes = np.array(sizes, np.int64)
    memory = memoryview(bytearray(300 * PAGE))
    room = arena.reserve_batch(Space(300 * PAGE), arena.lay_out(sizes, 64))
    entries = np.arange(len(sizes)) * 7
    arena.write_table(memory, room, room.places, sizes, entries)
    table = arena.read_table(memory, room.table_at, len(sizes))
    assert table[:, 0].tolist() == room.places.tolist()
    assert table[:, 1].tolist() == sizes.tolist()
    assert table[:, 2].tolist() == entries.tolist()


@pytest.mark.parametrize(("place", "size"), [(0, 10), (PAGE, 1 << 40), (-5, 1), (1 << 50, 1)])
def test_a_table_that_points_outside_is_refused(place, size):
    memory = memoryview(bytearray(4 * PAGE))
    np.frombuffer(memory, np.int64, 3, PAGE)[:] = place, size, 0
    with pytest.raises(ValueError, match="outside"):
        arena.read_table(memory, PAGE, 1)


def test_shared_memory_cannot_be_resized():
    fd = arena.create_memory(4 * PAGE)
    try:
        for length in (PAGE, 8 * PAGE):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, length)
    finally:
        os.close(fd)


def test_an_arena_is_never_longer_than_wanted():
    assert arena.affordable(1 << 20, 1) == 1 << 20
    assert arena.affordable((1 << 20) + 1, 1) == (1 << 20) + PAGE
