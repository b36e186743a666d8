"""Contract suites, public: whoever writes a storage tests it by subclassing one.

::

    class TestMyStorage(BulkReaderContract):
        @pytest.fixture
        def site(self, tmp_path):
            yield MySite(tmp_path)

A site keeps objects and opens the storage that reads them. ``SlowBulkReaderContract`` adds what can
only be seen when reads take time, for a site that can delay them. Needs pytest.
"""
# The names of the tests say what they show.
# ruff: noqa: D102

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pytest

from rayloader.config import PAGE
from rayloader.errors import (
    DirectUnsupported,
    ObjectNotFound,
    Replaced,
    StorageError,
    Truncated,
    UsageError,
)
from rayloader.storage import DROP, SKIP, BulkReader, Keys, Progress

PATIENCE = 20.0
"""No wait of a test lasts longer [s]."""
PART = 2 * PAGE
"""Length of the ranges in these tests, so that large objects are small [bytes]."""


class Site(Protocol):
    """Where a contract test keeps its objects, and how it opens the storage that reads them."""

    root: bytes
    any_name: bool
    """Whether a key may be any bytes, or must be UTF-8."""

    def put(self, key: bytes, data: bytes) -> None:
        """Create the object, or write it anew in place."""
        ...

    def replace(self, key: bytes, data: bytes) -> None:
        """Put another object under the key at once (as by a rename)."""
        ...

    def remove(self, key: bytes) -> None:
        """Delete the object."""
        ...

    def open(self, **spec: Any) -> BulkReader:
        """Open a storage; ``spec`` are fields of ``StorageSpec``."""
        ...


class SlowSite(Site, Protocol):
    """A site that can delay reads."""

    latency: float
    """Duration of every read, settable [s]."""

    def stick(self, key: bytes) -> None:
        """Let reads of the key never return."""
        ...

    def unstick(self, key: bytes) -> None:
        """Let them return after all."""
        ...


class Reading:
    """A storage with memory attached, driven as a reader drives it; every wait has an end."""

    PATTERN = 0xA5

    def __init__(self, storage: BulkReader, memory_bytes: int = 4 << 20) -> None:
        self.storage = storage
        memory = np.full(memory_bytes + PAGE, self.PATTERN, np.uint8)
        start = -memory.ctypes.data % PAGE  # a place that is aligned is so in memory too
        self.arena = memory[start : start + memory_bytes]
        storage.attach(self.arena.data)
        self._groups = 0
        self.reported: dict[int, Progress] = {}
        """What was collected and not yet waited for, by group."""

    def readable(self, timeout: float = 0.0) -> bool:
        """Whether the storage's descriptor becomes readable within ``timeout`` [s]."""
        poll = select.poll()
        poll.register(self.storage.fileno(), select.POLLIN)
        return bool(poll.poll(timeout * 1000))

    def until(self, holds: Callable[[], bool], what: str = "the condition") -> None:
        """Collect what comes until something holds."""
        deadline = time.monotonic() + PATIENCE
        while not holds():
            assert time.monotonic() < deadline, f"{what} did not come about"
            self.readable(0.005)
            self.note()

    def note(self) -> list[int]:
        """Collect, and remember; the groups that were reported."""
        reported = self.storage.collect()
        for progress in reported:
            assert progress.group not in self.reported, "reported twice"
            self.reported[progress.group] = progress
        return [progress.group for progress in reported]

    def wait(self, group: int) -> Progress:
        """The group's next progress."""
        deadline = time.monotonic() + PATIENCE
        while group not in self.reported:
            left = deadline - time.monotonic()
            assert left > 0, f"group {group} was not reported"
            self.readable(left)
            self.note()
        return self.reported.pop(group)

    def ask(self, root: bytes, keys: Sequence[bytes]) -> int:
        """Submit a group for measuring; its number."""
        self._groups += 1
        self.storage.measure(self._groups, root, Keys.of(keys))
        return self._groups

    def measured(self, root: bytes, keys: Sequence[bytes]) -> tuple[int, Progress]:
        """Measure a group: its number, and what came of it."""
        group = self.ask(root, keys)
        return group, self.wait(group)

    def read(self, root: bytes, keys: Sequence[bytes]) -> tuple[list[bytes], Progress]:
        """All bytes of a group, and the progress of its fetch. Nothing may fail to measure."""
        group, progress = self.measured(root, keys)
        assert not progress.failures
        places = packed(progress.sizes)
        self.storage.fetch(group, places)
        fetched = self.wait(group)
        return [self.at(p, s) for p, s in zip(places, progress.sizes, strict=True)], fetched

    def read_at_once(
        self,
        root: bytes,
        keys: Sequence[bytes],
        sizes: npt.NDArray[np.int64],
        places: npt.NDArray[np.int64],
    ) -> Progress:
        """Read a group whose sizes are known; what came of it."""
        self._groups += 1
        self.storage.read(self._groups, root, Keys.of(keys), sizes, places)
        return self.wait(self._groups)

    def at(self, place: int, size: int) -> bytes:
        """Some bytes of the memory."""
        return self.arena[place : place + size].tobytes()

    def untouched(self, first: int, end: int | None = None) -> bool:
        """Whether memory still is as it was when the test began."""
        return bool((self.arena[first:end] == self.PATTERN).all())


def packed(sizes: npt.NDArray[np.int64], first: int = 0) -> npt.NDArray[np.int64]:
    """Places one after the other, each at the start of a page; ``SKIP`` for what has no size."""
    room = (np.maximum(sizes, 0) + PAGE - 1) // PAGE * PAGE
    return np.where(sizes < 0, SKIP, first + np.cumsum(room) - room).astype(np.int64)


def content(key: bytes | str, size: int) -> bytes:
    """Bytes that differ from key to key and from place to place."""
    seed = int.from_bytes(os.fsencode(key)[-7:], "little")
    return np.random.default_rng(seed).bytes(size)


SIZES = [
    0, 1, 511, PAGE - 1, PAGE, PAGE + 1,
    PART - 1, PART, PART + 1, 3 * PART, 3 * PART + 5, 9 * PART - 1,
]  # fmt: skip


class AnyOrder:
    """Calls a storage in any order, and checks all that comes of it.

    There are eight numbers for groups, each with memory of its own, which is filled with a pattern
    whenever nothing may write into it.
    """

    ROOM = 1 << 18

    def __init__(
        self, reading: Reading, root: bytes, sizes: list[int], random: np.random.Generator
    ) -> None:
        self._storage = reading.storage
        self._reading = reading
        self._root = root
        self._sizes = [*sizes, -1]  # the last is the size of an object that does not exist
        self._random = random
        self._state = ["free"] * 8
        self._objects: list[list[int]] = [[] for _ in range(8)]
        self._places: list[npt.NDArray[np.int64]] = [np.zeros(0, np.int64)] * 8

    def run(self, steps: int) -> None:
        """Do that many things, then let everything end."""
        for _ in range(steps):
            self._step(int(self._random.integers(8)), int(self._random.integers(10)))
            self._collect(0.0005 if self._random.integers(4) == 0 else 0.0)
        deadline = time.monotonic() + PATIENCE
        while {"measuring", "fetching", "discarded"} & set(self._state):
            assert time.monotonic() < deadline, f"the groups do not end: {self._state}"
            self._collect(0.01)

    def _step(self, group: int, action: int) -> None:
        state = self._state[group]
        if state == "free":
            self._objects[group] = self._random.integers(0, len(self._sizes), 6).tolist()
            keys = Keys.of([b"r%d" % i for i in self._objects[group]])
            if action % 2:
                sizes = np.array([self._sizes[i] for i in self._objects[group]])
                self._places[group] = self._some_places(group, sizes)
                self._storage.read(group, self._root, keys, sizes, self._places[group])
                self._state[group] = "fetching"
                return
            self._storage.measure(group, self._root, keys)
            self._state[group] = "measuring"
        elif action == 0 and state != "discarded":
            self._storage.discard(group)
            self._state[group] = "discarded"
        elif action == 1:
            self._storage.set_concurrency(int(self._random.integers(1, 20)))
        elif state == "measured":
            sizes = np.array([self._sizes[i] for i in self._objects[group]])
            self._places[group] = self._some_places(group, sizes)
            self._storage.fetch(group, self._places[group])
            self._state[group] = "fetching"

    def _some_places(self, group: int, sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        places = packed(sizes, first=group * self.ROOM)
        choice = self._random.integers(0, 8, len(places))
        places = np.where((choice == 0) & (sizes >= 0), DROP, places)
        return np.where(choice == 1, SKIP, places).astype(np.int64)

    def _collect(self, timeout: float) -> None:
        self._reading.readable(timeout)
        for progress in self._storage.collect():
            group = progress.group
            expected = [self._sizes[i] for i in self._objects[group]]
            if self._state[group] == "measuring":
                assert progress.sizes.tolist() == expected
                assert [expected[i] for i in progress.failures] == [-1] * expected.count(-1)
                self._state[group] = "measured"
            else:
                assert self._state[group] == "fetching"
                self._check(group, expected, progress)
                self._state[group] = "free"
                self._wipe(group)
        for group, state in enumerate(self._state):
            if state == "discarded" and self._storage.settled(group):
                self._state[group] = "free"
                self._wipe(group)
        for group, state in enumerate(self._state):
            if state in ("free", "measuring", "measured"):
                start = group * self.ROOM
                assert self._reading.untouched(start, start + self.ROOM)

    def _check(self, group: int, expected: list[int], progress: Progress) -> None:
        assert not progress.failures
        for i, place in enumerate(self._places[group].tolist()):
            assert progress.sizes[i] == (-1 if place == SKIP else expected[i])
            if place >= 0:
                name = b"r%d" % self._objects[group][i]
                assert self._reading.at(place, expected[i]) == content(name, expected[i])

    def _wipe(self, group: int) -> None:
        self._reading.arena[group * self.ROOM : (group + 1) * self.ROOM] = Reading.PATTERN


class _Opens:
    """Opens storages for a test and closes them after it."""

    @pytest.fixture
    def site(self) -> Any:
        """Override: yield a ``Site``."""
        raise NotImplementedError("a contract test gives a site")

    @pytest.fixture
    def opened(self, site: Site) -> Iterator[Callable[..., Reading]]:
        """``opened(**spec)``: a ``Reading`` of the site."""
        storages: list[BulkReader] = []

        def open_one(**spec: Any) -> Reading:
            storage = site.open(**{"part_bytes": PART, "concurrency": 8, **spec})
            storages.append(storage)
            return Reading(storage)

        yield open_one
        for storage in storages:
            storage.close()


class BulkReaderContract(_Opens):
    """What every ``BulkReader`` does."""

    # What arrives

    def test_bytes_are_exact_at_every_size(
        self, site: Site, opened: Callable[..., Reading]
    ) -> None:
        keys = [b"size-%d" % size for size in SIZES]
        for key, size in zip(keys, SIZES, strict=True):
            site.put(key, content(key, size))
        data, fetched = opened().read(site.root, keys)
        assert not fetched.failures
        assert fetched.sizes.tolist() == SIZES
        assert data == [content(key, size) for key, size in zip(keys, SIZES, strict=True)]

    def test_objects_go_where_they_are_placed_and_nowhere_else(
        self, site: Site, opened: Callable[..., Reading]
    ) -> None:
        keys = [b"p%d" % i for i in range(20)]
        for i, key in enumerate(keys):
            site.put(key, content(key, 100 + 997 * i))
        reading = opened()
        group, progress = reading.measured(site.root, keys)
        order = np.random.default_rng(0).permutation(len(keys))
        places = order * 3 * PART + 11  # apart, unaligned, in no order
        reading.storage.fetch(group, places)
        assert not reading.wait(group).failures
        end = 0
        for i in np.argsort(places):
            assert reading.untouched(end, int(places[i]))
            end = int(places[i] + progress.sizes[i])
            assert reading.at(int(places[i]), int(progress.sizes[i])) == content(
                keys[i], 100 + 997 * i
            )
        assert reading.untouched(end)

    def test_the_same_object_may_be_in_a_group_often(
        self, site: Site, opened: Callable[..., Reading]
    ) -> None:
        site.put(b"once", content("once", 5000))
        site.put(b"other", content("other", 3 * PART + 1))
        keys = [b"once", b"other", b"once", b"other", b"once"]
        data, _ = opened().read(site.root, keys)
        assert data[0] == data[2] == data[4] == content("once", 5000)
        assert data[1] == data[3] == content("other", 3 * PART + 1)

    def test_a_name_may_be_any_bytes_a_path_may_be(
        self, site: Site, opened: Callable[..., Reading]
    ) -> None:
        keys = [
            b".hidden", b"_underscore", b"with space", b"dir.d/below/it", b"new\nline",
            b"semi;colon", b"per%20cent", b"#?&+", b"x" * 200, "ü🎈".encode(),
            *[b"\xff\xfe undecodable"] * site.any_name,
        ]  # fmt: skip
        for key in keys:
            site.put(key, content(key, 300))
        data, _ = opened().read(site.root, keys)
        assert data == [content(key, 300) for key in keys]

    def test_a_group_of_no_objects_goes_through_both_steps(
        self, site: Site, opened: Callable[..., Reading]
    ) -> None:
        reading = opened()
        group, progress = reading.measured(site.root, [])
        assert progress.sizes.tolist() == []
        reading.storage.fetch(group, np.zeros(0, np.int64))
        assert reading.wait(group).failures == {}

    def test_many_groups_under_way_at_once_keep_apart(
        self, site: Site, opened: Callable[..., Reading]
    ) -> None:
        keys = [b"g/%d" % i for i in range(60)]
        for i, key in enumerate(keys):
            site.put(key, content(key, 1000 + 211 * (i % 50)))
        reading = opened()
        groups = {reading.ask(site.root, keys[i : i + 3]): i for i in range(0, 60, 3)}
        places = {}
        for group in reversed(groups):
            sizes = reading.wait(group).sizes
            places[group] = packed(sizes, first=groups[group] * 4 * PAGE)
            reading.storage.fetch(group, places[group])
        for group, i in groups.items():
            sizes = reading.wait(group).sizes
            for key, place, size in zip(keys[i : i + 3], places[group], sizes, strict=True):
                assert reading.at(place, size) == content(key, size)

    def test_the_number_of_a_finished_group_is_free_again(
        self, site: Site, opened: Callable[..., Reading]
    ) -> None:
        site.put(b"a", b"aaa")
        storage = (reading := opened()).storage
        for _ in range(3):
            storage.measure(7, site.root, Keys.of([b"a"]))
            reading.wait(7)
            storage.fetch(7, np.zeros(1, np.int64))
            assert reading.wait(7).sizes.tolist() == [3]

    def test_dropped_objects_are_read_in_full_and_leave_memory_alone(
        self, site: Site, opened: Callable[..., Reading]
    ) -> None:
        sizes = [1, PAGE, 5 * PART + 3]
        for size in sizes:
            site.put(b"%d" % size, content(b"%d" % size, size))
        reading = opened(scratch_bytes=8 * PAGE)
        group, _ = reading.measured(site.root, [b"%d" % size for size in sizes])
        reading.storage.fetch(group, np.full(3, DROP))
        assert reading.wait(group).sizes.tolist() == sizes
        assert reading.storage.counters().bytes_transferred == sum(sizes)
        assert reading.untouched(0)

    def test_skipped_objects_are_not_read(self, site: Site, opened: Callable[..., Reading]) -> None:
        for key in (b"a", b"b", b"c"):
            site.put(key, content(key, 5000))
        reading = opened()
        group, _ = reading.measured(site.root, [b"a", b"b", b"c"])
        reading.storage.fetch(group, np.array([SKIP, 0, SKIP]))
        fetched = reading.wait(group)
        assert fetched.sizes.tolist() == [-1, 5000, -1]
        assert fetched.failures == {}
        assert reading.storage.counters().bytes_transferred == 5000
        assert reading.at(0, 5000) == content("b", 5000)

    # In one step, where the sizes are known

    def test_objects_of_known_sizes_are_read_in_one_step(
        self, site: Site, opened: Callable[..., Reading]
    ) -> None:
        keys = [b"size-%d" % size for size in SIZES]
        for key, size in zip(keys, SIZES, strict=True):
            site.put(key, content(key, size))
        reading = opened()
        sizes = np.array(SIZES, np.int64)
        places = packed(sizes)
        fetched = reading.read_at_once(site.root, keys, sizes, places)
        assert not fetched.failures
        assert fetched.sizes.tolist() == SIZES
        for key, place, size in zip(keys, places, SIZES, strict=True):
            assert reading.at(int(place), size) == content(key, size)

    @pytest.mark.parametrize("now", [0, 100, PART - 7, 2 * PART + 1, 5 * PART])
    def test_an_object_of_another_size_is_told_and_not_read(
        self, site: Site, opened: Callable[..., Reading], now: int
    ) -> None:
        site.put(b"same", content("same", 3000))
        site.put(b"other", content("other", now))
        reading = opened()
        for expected in (0, 99, 3 * PART):
            reading.arena[:] = Reading.PATTERN
            sizes = np.array([3000, expected], np.int64)
            fetched = reading.read_at_once(
                site.root, [b"same", b"other"], sizes, packed(sizes, first=PAGE)
            )
            if 1 in fetched.failures:  # what was listed is a promise
                assert isinstance(fetched.failures[1], Replaced | Truncated)
                assert fetched.sizes.tolist() == [3000, -1]
            else:
                assert fetched.sizes.tolist() == [3000, now]
            assert 0 not in fetched.failures
            assert reading.at(PAGE, 3000) == content("same", 3000)
            if now != expected:
                assert reading.untouched(2 * PAGE)

    def test_a_read_in_one_step_fails_by_name_and_alone(
        self, site: Site, opened: Callable[..., Reading]
    ) -> None:
        site.put(b"there", content("there", 3000))
        reading = opened()
        sizes = np.array([3000, 10, 0, 10 * PART], np.int64)
        keys = [b"there", b"gone", b"gone too", b"and this"]
        fetched = reading.read_at_once(site.root, keys, sizes, packed(sizes))
        assert sorted(fetched.failures) == [1, 2, 3]
        assert all(type(error) is ObjectNotFound for error in fetched.failures.values())
        assert fetched.sizes.tolist() == [3000, -1, -1, -1]
        assert reading.at(0, 3000) == content("there", 3000)

    def test_a_read_in_one_step_may_drop_and_skip(
        self, site: Site, opened: Callable[..., Reading]
    ) -> None:
        for key in (b"a", b"b", b"c"):
            site.put(key, content(key, 5000))
        reading = opened()
        sizes = np.array([5000, 5000, -1], np.int64)
        places = np.array([DROP, 0, SKIP], np.int64)
        fetched = reading.read_at_once(site.root, [b"a", b"b", b"c"], sizes, places)
        assert fetched.sizes.tolist() == [5000, 5000, -1]
        assert not fetched.failures
        assert reading.at(0, 5000) == content("b", 5000)
        assert reading.untouched(5000)
        assert reading.storage.counters().bytes_transferred == 10000

    def test_a_read_in_one_step_needs_a_size_and_room_for_each(
        self, site: Site, opened: Callable[..., Reading]
    ) -> None:
        site.put(b"a", b"aaa")
        reading = opened()
        last = len(reading.arena)
        for sizes, places in (
            ([-1], [0]),
            ([3], [last - 2]),
            ([3], [-7]),
            ([3, 3], [0]),
            ([3], [0, 3]),
        ):
            with pytest.raises(UsageError):
                reading.storage.read(
                    9,
                    site.root,
                    Keys.of([b"a"]),
                    np.array(sizes, np.int64),
                    np.array(places, np.int64),
                )
        assert reading.untouched(0)
        fetched = reading.read_at_once(site.root, [b"a"], np.array([3]), np.array([0]))
        assert fetched.sizes.tolist() == [3]

    # What goes wrong

    def test_a_missing_object_fails_by_name_and_alone(
        self, site: Site, opened: Callable[..., Reading]
    ) -> None:
        site.put(b"there", content("there", 3000))
        site.put(b"too", content("too", 4 * PART))
        reading = opened()
        group, progress = reading.measured(site.root, [b"there", b"gone\xff", b"too", b"no/where"])
        assert progress.sizes.tolist() == [3000, -1, 4 * PART, -1]
        assert sorted(progress.failures) == [1, 3]
        assert all(type(error) is ObjectNotFound for error in progress.failures.values())
        assert progress.failures[1].key == os.fsdecode(b"gone\xff")
        places = packed(progress.sizes)
        reading.storage.fetch(group, places)
        fetched = reading.wait(group)
        assert fetched.sizes.tolist() == progress.sizes.tolist()
        assert fetched.failures == {}
        assert reading.at(places[0], 3000) == content("there", 3000)
        assert reading.at(places[2], 4 * PART) == content("too", 4 * PART)

    def test_an_object_that_grows_gives_its_measured_size(
        self, site: Site, opened: Callable[..., Reading]
    ) -> None:
        site.put(b"log", content("log", PART + 10))
        reading = opened()
        group, _ = reading.measured(site.root, [b"log"])
        site.put(b"log", content("log", PART + 10) + b"more" * PAGE)
        reading.storage.fetch(group, np.zeros(1, np.int64))
        assert reading.wait(group).sizes.tolist() == [PART + 10]
        assert reading.at(0, PART + 10) == content("log", PART + 10)
        assert reading.untouched(-(-(PART + 10) // PAGE) * PAGE)

    @pytest.mark.parametrize("left", [0, 100, PAGE, PART, 2 * PART + 1])
    def test_an_object_that_shrinks_is_truncated_and_others_are_not(
        self, site: Site, opened: Callable[..., Reading], left: int
    ) -> None:
        whole = content("short", 3 * PART)
        site.put(b"short", whole)
        site.put(b"well", content("well", 3 * PART))
        reading = opened()
        group, progress = reading.measured(site.root, [b"short", b"well"])
        site.put(b"short", whole[:left])
        places = packed(progress.sizes)
        reading.storage.fetch(group, places)
        fetched = reading.wait(group)
        assert type(fetched.failures[0]) is Truncated
        assert fetched.sizes.tolist() == [-1, 3 * PART]
        assert reading.at(places[1], 3 * PART) == content("well", 3 * PART)

    def test_a_replaced_object_gives_its_old_bytes_or_its_new_ones_or_an_error_never_a_mixture(
        self, site: Site, opened: Callable[..., Reading]
    ) -> None:
        old, new = content("old", 3 * PART), content("new", 3 * PART)
        site.put(b"it", old)
        reading = opened()
        group, _ = reading.measured(site.root, [b"it"])
        site.replace(b"it", new)
        reading.storage.fetch(group, np.zeros(1, np.int64))
        fetched = reading.wait(group)
        assert fetched.failures or reading.at(0, 3 * PART) in (old, new)
        assert all(isinstance(error, StorageError) for error in fetched.failures.values())

    def test_a_removed_object_gives_its_bytes_or_is_not_found(
        self, site: Site, opened: Callable[..., Reading]
    ) -> None:
        site.put(b"it", content("it", 3 * PART))
        reading = opened()
        group, _ = reading.measured(site.root, [b"it"])
        site.remove(b"it")
        reading.storage.fetch(group, np.zeros(1, np.int64))
        fetched = reading.wait(group)
        if fetched.failures:
            assert type(fetched.failures[0]) is ObjectNotFound
        else:
            assert reading.at(0, 3 * PART) == content("it", 3 * PART)

    # Leaving off

    def test_a_group_discarded_while_measured_is_never_reported(
        self, site: Site, opened: Callable[..., Reading]
    ) -> None:
        keys = [b"d%d" % i for i in range(50)]
        for key in keys:
            site.put(key, b"x")
        reading = opened()
        gone, kept = reading.ask(site.root, keys), reading.ask(site.root, keys)
        reading.storage.discard(gone)
        reading.wait(kept)
        reading.until(reading.storage.settled)
        assert gone not in reading.reported
        assert not reading.readable(0.02) or reading.note() == []

    @pytest.mark.parametrize("collected", [False, True])
    def test_a_measured_group_may_be_discarded(
        self, site: Site, opened: Callable[..., Reading], collected: bool
    ) -> None:
        site.put(b"a", b"aaa")
        reading = opened()
        group = reading.ask(site.root, [b"a"] * 10)
        if collected:
            reading.wait(group)
        else:
            reading.readable(0.1)
        reading.storage.discard(group)
        assert reading.note() == []
        with pytest.raises(UsageError):
            reading.storage.fetch(group, np.full(10, SKIP))
        assert reading.read(site.root, [b"a"])[0] == [b"aaa"]

    def test_nothing_is_written_once_a_discarded_fetch_has_settled(
        self, site: Site, opened: Callable[..., Reading]
    ) -> None:
        keys = [b"w%d" % i for i in range(12)]
        for key in keys:
            site.put(key, content(key, 5 * PART))
        reading = opened()
        for pause in (0.0, 0.0002, 0.001, 0.005):
            group, progress = reading.measured(site.root, keys)
            reading.storage.fetch(group, packed(progress.sizes))
            time.sleep(pause)
            reading.storage.discard(group)
            reading.until(reading.storage.settled)
            reading.arena[:] = Reading.PATTERN
            time.sleep(0.01)
            assert reading.untouched(0)
            assert group not in reading.reported

    def test_a_finished_fetch_that_was_not_collected_may_be_discarded(
        self, site: Site, opened: Callable[..., Reading]
    ) -> None:
        site.put(b"a", b"aaa")
        reading = opened()
        group, _ = reading.measured(site.root, [b"a"])
        reading.storage.fetch(group, np.zeros(1, np.int64))
        assert reading.readable(PATIENCE)
        reading.storage.discard(group)
        assert reading.storage.settled()
        assert reading.note() == []

    def test_the_number_of_a_discarded_group_is_free_at_once(
        self, site: Site, opened: Callable[..., Reading]
    ) -> None:
        site.put(b"a", b"aaa")
        site.put(b"b", b"bb")
        reading = opened()
        for _ in range(20):
            reading.storage.measure(1, site.root, Keys.of([b"a"] * 9))
            reading.storage.discard(1)
            reading.storage.measure(1, site.root, Keys.of([b"b"]))
            assert reading.wait(1).sizes.tolist() == [2]
            reading.storage.discard(1)

    def test_discarding_what_is_not_there_is_no_mistake(
        self, site: Site, opened: Callable[..., Reading]
    ) -> None:
        reading = opened()
        reading.storage.discard(12345)
        assert reading.storage.settled()

    @pytest.mark.parametrize("seed", range(4))
    def test_calls_in_any_order_keep_the_contract(
        self, site: Site, opened: Callable[..., Reading], seed: int
    ) -> None:
        sizes = [0, 1, 700, PAGE, PART + 1, 3 * PART, 5 * PART - 1]
        for i, size in enumerate(sizes):
            site.put(b"r%d" % i, content(b"r%d" % i, size))
        AnyOrder(opened(), site.root, sizes, np.random.default_rng(seed)).run(steps=400)

    # The descriptor

    def test_the_descriptor_is_readable_exactly_while_there_is_something_to_collect(
        self, site: Site, opened: Callable[..., Reading]
    ) -> None:
        site.put(b"a", b"aaa")
        reading = opened()
        assert not reading.readable()
        first, second = reading.ask(site.root, [b"a"]), reading.ask(site.root, [b"a"])
        reading.until(lambda: {first, second} <= set(reading.reported))
        assert not reading.readable()
        assert reading.note() == []

    # What is counted

    def test_reads_and_bytes_are_counted(self, site: Site, opened: Callable[..., Reading]) -> None:
        site.put(b"small", bytes(100))
        site.put(b"large", bytes(4 * PART + 1))
        reading = opened()
        before = reading.storage.counters()
        assert (before.reads, before.bytes_transferred, before.peak_in_flight) == (0, 0, 0)
        reading.read(site.root, [b"small", b"large"])
        count = reading.storage.counters()
        assert count.reads == 1 + 5
        assert count.bytes_transferred == 100 + 4 * PART + 1
        assert count.metadata_ops >= 2
        assert sum(count.latency) == count.reads
        assert count.read_seconds >= 0
        assert 1 <= count.peak_in_flight <= 6
        assert count.retries == count.direct_bytes == count.direct_fallback_files == 0
        assert count.cache_dropped_files == 0
        reading.storage.reset_peak()
        assert reading.storage.counters().peak_in_flight == 0

    def test_files_dropped_from_the_cache_are_counted(
        self, site: Site, opened: Callable[..., Reading]
    ) -> None:
        site.put(b"a", content("a", 5000))
        reading = opened(drop_cache=True)
        data, _ = reading.read(site.root, [b"a", b"a"])
        assert data == [content("a", 5000)] * 2
        assert reading.storage.counters().cache_dropped_files in (0, 2)

    @pytest.mark.parametrize("direct", [True, "fallback"])
    def test_direct_reads_are_exact_and_counted_or_refused_aloud(
        self, site: Site, opened: Callable[..., Reading], direct: Any
    ) -> None:
        keys = [b"size-%d" % size for size in SIZES]
        for key, size in zip(keys, SIZES, strict=True):
            site.put(key, content(key, size))
        reading = opened(direct=direct)
        group, progress = reading.measured(site.root, keys)
        if progress.failures:
            assert direct is True
            assert {type(error) for error in progress.failures.values()} == {DirectUnsupported}
            return
        places = packed(progress.sizes)
        reading.storage.fetch(group, places)
        fetched = reading.wait(group)
        count = reading.storage.counters()
        if fetched.failures:
            assert direct is True
            assert {type(error) for error in fetched.failures.values()} == {DirectUnsupported}
            return
        for key, place, size in zip(keys, places, SIZES, strict=True):
            assert reading.at(place, size) == content(key, size)
        assert count.direct_bytes > 0 or count.direct_fallback_files == len(SIZES)
        if count.direct_fallback_files == 0:
            assert count.direct_bytes == count.bytes_transferred >= sum(SIZES)

    # Concurrency

    @pytest.mark.parametrize("concurrency", [1, 2, 64])
    def test_no_more_reads_are_in_flight_than_allowed(
        self, site: Site, opened: Callable[..., Reading], concurrency: int
    ) -> None:
        keys = [b"c%d" % i for i in range(100)]
        for key in keys:
            site.put(key, content(key, 3 * PART))
        reading = opened(concurrency=concurrency)
        data, _ = reading.read(site.root, keys)
        assert data == [content(key, 3 * PART) for key in keys]
        assert 1 <= reading.storage.counters().peak_in_flight <= concurrency

    def test_the_concurrency_may_change_while_reads_are_under_way(
        self, site: Site, opened: Callable[..., Reading]
    ) -> None:
        keys = [b"c%d" % i for i in range(40)]
        for key in keys:
            site.put(key, content(key, 2 * PART + 7))
        reading = opened(concurrency=4)
        for concurrency in (1, 64, 2, 200, 3):
            group, progress = reading.measured(site.root, keys)
            places = packed(progress.sizes)
            reading.storage.fetch(group, places)
            reading.storage.set_concurrency(concurrency)
            assert not reading.wait(group).failures
            for key, place in zip(keys, places, strict=True):
                assert reading.at(place, 2 * PART + 7) == content(key, 2 * PART + 7)
        reading.storage.reset_peak()
        reading.read(site.root, keys)
        assert reading.storage.counters().peak_in_flight <= 3

    # Misuse

    def test_what_the_protocol_does_not_allow_is_an_error_and_harms_nothing(
        self, site: Site, opened: Callable[..., Reading]
    ) -> None:
        site.put(b"a", content("a", 5000))
        reading = opened()
        storage = reading.storage
        group, _ = reading.measured(site.root, [b"a", b"missing"])
        room = len(reading.arena)
        for places in (
            [0], [0, SKIP, SKIP],  # another number of objects
            [room - 4999, SKIP], [room, SKIP], [1 << 62, SKIP], [-3, SKIP],  # no room
            [0, 8192], [0, DROP],  # what was not measured
        ):  # fmt: skip
            with pytest.raises(UsageError):
                storage.fetch(group, np.array(places))
        with pytest.raises(UsageError):
            storage.fetch(999, np.zeros(1, np.int64))
        with pytest.raises(UsageError):
            storage.measure(group, site.root, Keys.of([b"a"]))
        with pytest.raises(UsageError):
            storage.attach(memoryview(bytearray(10)))
        storage.fetch(group, np.array([room - 5000, SKIP]))
        assert reading.wait(group).sizes.tolist() == [5000, -1]
        assert reading.at(room - 5000, 5000) == content("a", 5000)
        with pytest.raises(UsageError):
            storage.fetch(group, np.array([0, SKIP]))

    def test_memory_that_cannot_be_written_is_refused(self, site: Site) -> None:
        storage = site.open()
        with pytest.raises((BufferError, UsageError)):
            storage.attach(memoryview(b"read only"))
        storage.close()

    def test_a_storage_is_of_no_use_in_a_forked_child(
        self, site: Site, opened: Callable[..., Reading]
    ) -> None:
        site.put(b"a", content("a", 5000))
        reading = opened()
        reading.read(site.root, [b"a"])
        child = os.fork()
        if child == 0:
            status = 1
            try:
                with pytest.raises(UsageError):
                    reading.storage.collect()
                reading.storage.close()
                status = 0
            finally:
                os._exit(status)
        deadline = time.monotonic() + PATIENCE
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
            assert time.monotonic() < deadline, "the child hangs"
            time.sleep(0.005)
        assert ended[1] == 0
        assert reading.read(site.root, [b"a"])[0] == [content("a", 5000)]

    # The end

    def test_closing_twice_is_closing_once_and_then_nothing_goes(self, site: Site) -> None:
        storage = site.open()
        storage.close()
        storage.close()
        for call in (storage.collect, storage.settled, storage.counters, storage.fileno):
            with pytest.raises(UsageError):
                call()

    @pytest.mark.parametrize("pause", [0.0, 0.0005, 0.005])
    def test_closing_with_reads_under_way_frees_the_memory(
        self, site: Site, opened: Callable[..., Reading], pause: float
    ) -> None:
        keys = [b"w%d" % i for i in range(30)]
        for key in keys:
            site.put(key, content(key, 5 * PART))
        storage = site.open(part_bytes=PART, concurrency=16)
        memory = bytearray(4 << 20)
        storage.attach(memoryview(memory))
        storage.measure(1, site.root, Keys.of(keys))
        select.select([storage.fileno()], [], [], PATIENCE)
        (progress,) = storage.collect()
        storage.fetch(1, packed(progress.sizes))
        storage.measure(2, site.root, Keys.of(keys))
        time.sleep(pause)
        storage.close()
        memory.append(0)  # refused while the storage exports it

    def test_opening_and_closing_leaves_no_thread_and_no_descriptor(self, site: Site) -> None:
        site.put(b"a", content("a", 3 * PART))
        before = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
        for i in range(300):
            storage = site.open(part_bytes=PART)
            if i % 3:
                reading = Reading(storage, 1 << 18)
                reading.measured(site.root, [b"a"] * 4)
            if i % 3 == 2:
                reading.read(site.root, [b"a"])
            storage.close()
        assert len(os.listdir("/proc/self/fd")) <= before[0]
        deadline = time.monotonic() + PATIENCE
        while len(os.listdir("/proc/self/task")) > before[1]:  # a joined thread may still be seen
            assert time.monotonic() < deadline, "threads are left"
            time.sleep(0.001)


class SlowBulkReaderContract(_Opens):
    """What every ``BulkReader`` does while reads take time. The site is a ``SlowSite``.

    Attributes:
        latency: of reads that are timed; more where the site itself is slow [s].
        objects: that are timed with 64 in flight [objects].
    """

    latency = 0.01
    objects = 1024

    def timed(self, site: SlowSite, reading: Reading, files: int) -> float:
        """Seconds that a fetch of so many small objects takes [s]."""
        keys = [b"t%d" % i for i in range(files)]
        group, progress = reading.measured(site.root, keys)
        began = time.perf_counter()
        reading.storage.fetch(group, packed(progress.sizes))
        assert not reading.wait(group).failures
        return time.perf_counter() - began

    def test_64_in_flight_are_50_times_as_fast_as_one(
        self, site: SlowSite, opened: Callable[..., Reading]
    ) -> None:
        for i in range(self.objects):
            site.put(b"t%d" % i, bytes(100))
        one, many = opened(concurrency=1), opened(concurrency=64)
        site.latency = 0.0
        many.read(site.root, [b"t%d" % i for i in range(64)])
        site.latency = self.latency
        self.timed(site, many, self.objects)  # opens threads, finds out that the storage is slow
        many.storage.reset_peak()
        before = many.storage.counters().read_seconds
        ratios: list[float] = []
        while max(ratios, default=0.0) < 50:
            assert len(ratios) < 12, f"64 in flight are {ratios} times as fast as one"
            many_seconds = self.timed(site, many, self.objects) / self.objects
            ratios.append(self.timed(site, one, 16) / 16 / many_seconds)
        count = many.storage.counters()
        assert count.peak_in_flight == 64
        assert one.storage.counters().peak_in_flight == 1
        assert (count.read_seconds - before) / len(ratios) >= self.objects * 0.99 * self.latency

    def test_all_reads_are_in_flight_within_moments(
        self, site: SlowSite, opened: Callable[..., Reading]
    ) -> None:
        for i in range(64):
            site.put(b"t%d" % i, bytes(100))
        reading = opened(concurrency=64)
        group, progress = reading.measured(site.root, [b"t%d" % i for i in range(64)])
        site.latency = 1.0
        began = time.perf_counter()
        reading.storage.fetch(group, packed(progress.sizes))
        reading.until(lambda: reading.storage.counters().peak_in_flight == 64, "a peak of 64")
        assert time.perf_counter() - began < 0.5
        assert reading.storage.counters().in_flight == 64
        site.latency = 0.0
        reading.wait(group)
        assert reading.storage.counters().in_flight == 0

    def test_a_large_object_is_read_as_parallel_ranges(
        self, site: SlowSite, opened: Callable[..., Reading]
    ) -> None:
        site.put(b"large", content("large", 32 * PART))
        reading = opened(concurrency=32)
        site.latency = 0.1
        group, _ = reading.measured(site.root, [b"large"])
        began = time.perf_counter()
        reading.storage.fetch(group, np.zeros(1, np.int64))
        reading.wait(group)
        assert time.perf_counter() - began < 32 * 0.1 / 4
        assert reading.storage.counters().peak_in_flight == 32
        assert reading.at(0, 32 * PART) == content("large", 32 * PART)

    def test_a_lower_concurrency_holds_as_soon_as_reads_end(
        self, site: SlowSite, opened: Callable[..., Reading]
    ) -> None:
        for i in range(256):
            site.put(b"t%d" % i, bytes(100))
        reading = opened(concurrency=32)
        site.latency = 0.01
        self.timed(site, reading, 256)
        reading.storage.set_concurrency(3)
        reading.storage.reset_peak()
        self.timed(site, reading, 32)
        assert reading.storage.counters().peak_in_flight == 3
        reading.storage.set_concurrency(48)
        self.timed(site, reading, 256)
        assert reading.storage.counters().peak_in_flight == 48

    def test_the_concurrency_may_change_while_large_objects_are_dropped(
        self, site: SlowSite, opened: Callable[..., Reading]
    ) -> None:
        size = 30 * PAGE + 1
        site.put(b"large", content("large", size))
        reading = opened(concurrency=4, part_bytes=8 * PAGE, scratch_bytes=8 * PAGE)
        for concurrency in (1, 8, 2, 1, 8):  # the length of the ranges changes with it
            site.latency = 0.002
            group, _ = reading.measured(site.root, [b"large"] * 2)
            reading.storage.fetch(group, np.full(2, DROP))
            reading.until(lambda: reading.storage.oldest_read()[0] > 0)
            reading.storage.set_concurrency(concurrency)
            assert reading.wait(group).sizes.tolist() == [size] * 2
        assert reading.storage.counters().bytes_transferred == 5 * 2 * size

    def test_one_object_that_does_not_answer_delays_no_other(
        self, site: SlowSite, opened: Callable[..., Reading]
    ) -> None:
        keys = [b"t%d" % i for i in range(120)]
        for key in keys:
            site.put(key, content(key, 2000))
        reading = opened(concurrency=4)
        reading.read(site.root, keys)  # quick: the storage takes them in runs, if it ever does
        site.stick(b"t40")
        groups = [reading.measured(site.root, keys[i : i + 40])[0] for i in (0, 40, 80)]
        for i, group in enumerate(groups):
            reading.storage.fetch(group, np.arange(40 * i, 40 * i + 40) * PAGE)
        for i in (0, 2):
            assert not reading.wait(groups[i]).failures
        reading.until(lambda: reading.storage.counters().reads == 120 + 119, "all other reads")
        for i in set(range(120)) - {40}:
            assert reading.at(i * PAGE, 2000) == content(keys[i], 2000)
        reading.until(lambda: reading.storage.oldest_read()[0] > 0.02)
        assert reading.storage.oldest_read()[1] == "t40"
        site.unstick(b"t40")
        assert not reading.wait(groups[1]).failures
        assert reading.storage.oldest_read() == (0.0, "")

    def test_a_discarded_group_has_not_settled_while_a_read_of_it_is_in_flight(
        self, site: SlowSite, opened: Callable[..., Reading]
    ) -> None:
        site.put(b"slow", content("slow", 5000))
        site.put(b"a", content("a", 5000))
        reading = opened()
        group, _ = reading.measured(site.root, [b"slow", b"a"])
        site.stick(b"slow")
        reading.storage.fetch(group, np.array([0, 2 * PAGE]))
        reading.until(lambda: reading.storage.counters().reads == 1)
        reading.until(lambda: reading.storage.oldest_read()[1] == "slow")
        reading.storage.discard(group)
        assert not reading.storage.settled()
        assert not reading.storage.settled(group)
        assert reading.storage.oldest_read() == (0.0, ""), "nobody waits for it any more"
        assert reading.read(site.root, [b"a"])[0] == [content("a", 5000)]
        assert not reading.storage.settled(group)
        assert not reading.readable(0.01)
        self.one_settles_alone(site, reading)
        assert not reading.storage.settled(group)
        site.unstick(b"slow")
        assert reading.readable(PATIENCE), "the descriptor tells when it has settled"
        reading.until(reading.storage.settled)
        assert reading.note() == []

    def one_settles_alone(self, site: SlowSite, reading: Reading) -> None:
        """Discard a second group in the middle of a read: it settles by itself, and tells."""
        site.put(b"late", content("late", 100))
        other, _ = reading.measured(site.root, [b"late"])
        site.stick(b"late")
        reading.storage.fetch(other, np.array([4 * PAGE]))
        reading.until(lambda: reading.storage.oldest_read()[1] == "late")
        reading.storage.discard(other)
        assert not reading.storage.settled(other)
        site.unstick(b"late")
        assert reading.readable(PATIENCE), "the descriptor tells when one has settled"
        assert reading.note() == []
        reading.until(lambda: reading.storage.settled(other))

    def test_closing_does_not_wait_for_a_read_that_does_not_return(
        self, site: SlowSite, opened: Callable[..., Reading]
    ) -> None:
        site.put(b"slow", content("slow", 5000))
        reading = opened()
        group, _ = reading.measured(site.root, [b"slow"] * 3)
        site.stick(b"slow")
        reading.storage.fetch(group, np.arange(3) * 2 * PAGE)
        reading.until(lambda: reading.storage.oldest_read()[0] > 0)
        threads = len(os.listdir("/proc/self/task"))
        began = time.perf_counter()
        reading.storage.close()
        assert time.perf_counter() - began < 1.0
        site.unstick(b"slow")
        deadline = time.monotonic() + PATIENCE
        while len(os.listdir("/proc/self/task")) >= threads:
            assert time.monotonic() < deadline, "the threads left behind do not end"
            time.sleep(0.01)

    def test_a_slow_read_takes_as_long_as_it_takes(
        self, site: SlowSite, opened: Callable[..., Reading]
    ) -> None:
        site.put(b"t", bytes(100))
        reading = opened(concurrency=1)
        reading.read(site.root, [b"t"])
        before = reading.storage.counters()
        site.latency = 0.02
        reading.read(site.root, [b"t"])
        count = reading.storage.counters()
        assert count.read_seconds - before.read_seconds >= 0.0199
        (bucket,) = np.flatnonzero(np.subtract(count.latency, before.latency))
        assert 2 ** (bucket / 4) <= 1e6 * (count.read_seconds - before.read_seconds)
        assert 2 ** ((bucket + 1) / 4) > 19_900

    def test_counting_and_collecting_never_wait_for_reads(
        self, site: SlowSite, opened: Callable[..., Reading]
    ) -> None:
        site.put(b"slow", content("slow", 5000))
        reading = opened(concurrency=2)
        group, _ = reading.measured(site.root, [b"slow"] * 8)
        site.stick(b"slow")
        reading.storage.fetch(group, np.arange(8) * 2 * PAGE)
        reading.until(lambda: reading.storage.oldest_read()[0] > 0.01)
        began = time.perf_counter()
        for _ in range(50):
            reading.storage.counters()
            reading.storage.collect()
            reading.storage.oldest_read()
            reading.ask(site.root, [b"slow"])
        assert time.perf_counter() - began < 1.0
        site.unstick(b"slow")
        reading.wait(group)
