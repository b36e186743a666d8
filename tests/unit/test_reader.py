"""The reader alone, driven by a trainer in the same thread: no Ray, no sockets, no files."""

import math
import select
import time

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayloader import arena, errors
from rayloader.arena import HEADER_BYTES
from rayloader.catalog import Catalog
from rayloader.config import PAGE, Options
from rayloader.plan import EpochPlan, ListPlan, Shard
from rayloader.reader import Blocked, Ended, Failed, Reader, ReaderCounts, Ready, Request, Warned
from rayloader.storage import open_storage
from rayloader.storage.memory import Fault, MemorySpec


class Trainer:
    """Drives a reader over objects in memory and checks every byte that it is given."""

    def __init__(self, objects, *, faults=None, latency=0.0, bandwidth=math.inf, **options):
        self.objects = objects
        self.options = Options(**{"batch_size": 3, "memory_bytes": 64 * PAGE, **options})
        self.catalog = Catalog(b"", pa.array(sorted(objects), pa.large_binary()))
        spec = MemorySpec(
            objects=objects, faults=faults or {}, latency=latency, bandwidth=bandwidth,
            concurrency=self.options.concurrency, part_bytes=self.options.part_bytes,
            scratch_bytes=self.options.memory_bytes,
        )  # fmt: skip
        self.storage = open_storage(spec)
        self.memory = memoryview(bytearray(self.options.memory_bytes))
        self.storage.attach(self.memory)
        self.reader = Reader(self.storage, self.memory, self.options)
        self.generation = self.taken = 0
        self.seen: list = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.storage.close()

    def plan(self, **more):
        size = self.options.batch_size
        return EpochPlan(len(self.catalog), Shard(), size, shuffle=False, **more)

    def begin(self, plan=None, **more):
        self.reader.abandon(self.taken)
        self.generation += 1
        self.taken = 0
        self.seen = []
        plan = plan or self.plan()
        self.reader.begin(Request(self.generation, 0, 0, plan, **more), self.catalog)

    def outcome(self):
        """The next outcome; outcomes that came with it wait."""
        poll = select.poll()
        poll.register(self.storage.fileno(), select.POLLIN)
        deadline = time.monotonic() + 20
        while not self.seen:
            self.seen += self.reader.advance()
            if not self.seen:
                poll.poll(20)
            assert time.monotonic() < deadline, "the reader hangs"
        return self.seen.pop(0)

    def keys(self, ready):
        """The names in a batch, after comparing all its bytes with the objects."""
        table = arena.read_table(self.memory, ready.table_at, ready.samples)
        names = [self.catalog.keys_at(table[i : i + 1, 2])[0] for i in range(len(table))]
        for (start, size, _), name in zip(table.tolist(), names, strict=True):
            assert size == len(self.objects[name])
            if self.options.deliver:
                assert bytes(self.memory[start : start + size]) == self.objects[name]
            else:
                assert start == arena.NOT_DELIVERED
        return names

    def drop(self, ready):
        self.take(ready)
        self.reader.released(self.generation, ready.table_at)

    def take(self, ready):
        self.taken += 1
        self.reader.taken(self.taken)

    def read(self):
        """Names of each batch until the end, dropping each at once."""
        batches = []
        while not isinstance(outcome := self.outcome(), Ended):
            assert isinstance(outcome, Ready), outcome
            batches.append(self.keys(outcome))
            self.drop(outcome)
        return batches


def objects(count, size=1000):
    return {
        f"{number:04}".encode(): np.random.default_rng(number).bytes(size + 13 * number)
        for number in range(count)
    }


def in_batches(names, size):
    return [names[at : at + size] for at in range(0, len(names), size)]


@pytest.mark.parametrize("deliver", [True, False])
def test_batches_come_in_the_order_of_the_plan(deliver):
    with Trainer(objects(20), deliver=deliver) as trainer:
        for _ in range(3):
            trainer.begin()
            assert trainer.read() == in_batches(sorted(trainer.objects), 3)


def test_an_epoch_without_a_rest_ends_at_once():
    with Trainer(objects(7)) as trainer:
        trainer.begin(first_step=3)
        assert trainer.outcome() == Ended(3)


def test_a_request_may_begin_anywhere_and_leave_out_what_was_delivered():
    with Trainer(objects(20)) as trainer:
        trainer.begin(first_step=2, delivered=frozenset({3, 5}))
        expected = in_batches(sorted(trainer.objects), 3)
        assert trainer.read() == [expected[2], expected[4], expected[6]]


def test_sixty_four_in_flight_are_fifty_times_as_fast_as_one():
    def seconds_per_read(concurrency, reads):
        with Trainer(
            objects(reads, 100), latency=0.05, concurrency=concurrency, batch_size=8,
            memory_bytes=4 << 20,
        ) as trainer:  # fmt: skip
            trainer.begin()
            began = time.perf_counter()
            while not isinstance(outcome := trainer.outcome(), Ended):
                trainer.drop(outcome)
            seconds = time.perf_counter() - began
            counts = ReaderCounts.of(np.frombuffer(trainer.memory, np.int64, 512))
            assert counts.peak_in_flight == concurrency
            return seconds / reads

    one = seconds_per_read(1, 20)
    many = min(seconds_per_read(64, 1280) for _ in range(2))
    assert one / many >= 50


def test_unordered_batches_do_not_wait_for_a_slow_one():
    names = sorted(objects(12))
    faults = {names[0]: Fault(delay=0.2)}
    with Trainer(objects(12), faults=faults, ordered=False) as trainer:
        trainer.begin()
        batches = trainer.read()
        assert batches[-1] == names[:3]
        assert sorted(batches) == in_batches(names, 3)


def test_no_more_is_read_ahead_than_asked():
    with Trainer(objects(40), read_ahead_batches=2) as trainer:
        trainer.begin()
        first, second = trainer.outcome(), trainer.outcome()
        time.sleep(0.05)
        assert trainer.reader.advance() == []
        assert trainer.storage.counters().reads == 6
        trainer.drop(first)
        trainer.drop(second)
        assert trainer.outcome().step == 2


def test_a_full_arena_waits_for_the_trainer_and_says_so_once():
    with Trainer(objects(9, 9 * PAGE), memory_bytes=32 * PAGE) as trainer:
        trainer.begin()
        held = trainer.outcome()
        trainer.take(held)
        blocked = trainer.outcome()
        assert isinstance(blocked, Blocked)
        assert blocked.step == 1
        assert trainer.reader.advance() == []
        trainer.keys(held)
        trainer.reader.released(trainer.generation, held.table_at)
        assert trainer.outcome().step == 1


def test_a_batch_larger_than_the_arena_names_the_figure_to_set():
    data = objects(3, 30 * PAGE)
    with Trainer(data) as trainer:
        trainer.begin()
        failed = trainer.outcome()
        assert isinstance(failed.error, errors.BatchTooLarge)
        needed = int(str(failed.error).split("at least ")[1].split(", or")[0].replace(",", ""))
    with Trainer(data, memory_bytes=needed) as trainer:
        trainer.begin()
        assert len(trainer.read()) == 1
    with Trainer(data, memory_bytes=needed - PAGE) as trainer:
        trainer.begin()
        assert isinstance(trainer.outcome(), Failed)


def test_an_error_comes_after_the_batches_before_it_and_ends_the_epoch():
    names = sorted(objects(12))
    with Trainer(objects(12), faults={names[7]: Fault(errno=5)}) as trainer:
        trainer.begin()
        assert [trainer.outcome().step for _ in range(2)] == [0, 1]
        failed = trainer.outcome()
        assert type(failed.error) is errors.StorageError
        assert failed.error.key == "0007"
        assert "rank 0, epoch 0, batch 2" in failed.error.__notes__
        trainer.begin(ListPlan(6, 3))
        assert trainer.read() == in_batches(names[:6], 3)


def test_an_error_leaves_the_batches_before_it_to_the_trainer():
    names = sorted(objects(30))
    with Trainer(objects(30), faults={names[7]: Fault(errno=5)}) as trainer:
        trainer.begin()
        held = trainer.outcome()
        trainer.take(held)
        left = trainer.outcome()
        assert isinstance(trainer.outcome(), Failed)
        assert trainer.keys(left) == names[3:6], "sent before the error, and not yet taken"
        trainer.begin(first_step=4)
        assert trainer.read() == in_batches(names, 3)[4:]
        assert trainer.keys(held) == names[:3]
        trainer.reader.released(1, held.table_at)
        assert trainer.reader._space.free == len(trainer.memory) - HEADER_BYTES


def test_samples_that_fail_are_left_out_listed_and_counted_against_the_budget():
    names = sorted(objects(12))
    faults = {names[1]: Fault(errno=5), names[4]: Fault(on="measure", errno=13)}
    with Trainer(objects(12), faults=faults, on_error="skip", skip_budget_share=0.2) as trainer:
        trainer.begin()
        batches, skipped = [], []
        while not isinstance(outcome := trainer.outcome(), Ended):
            batches.append(trainer.keys(outcome))
            skipped += outcome.skipped
            assert outcome.names.names == len(batches[-1])
            trainer.drop(outcome)
        assert batches == [[n for n in b if n not in faults] for b in in_batches(names, 3)]
        assert [skip.key for skip in skipped] == ["0001", "0004"]
        trainer.begin(skipped=1)
        assert isinstance(trainer.outcome(), Ready)
        assert isinstance(trainer.outcome().error, errors.SkipBudgetExceeded)


def test_a_read_that_never_returns_is_warned_of_and_given_up_by_name():
    faults = {b"0002": Fault(delay=math.inf)}
    with Trainer(objects(6), faults=faults, stall_seconds=0.05, read_timeout=0.3) as trainer:
        trainer.begin()
        warned = trainer.outcome()
        assert isinstance(warned, Warned)
        assert warned.text.startswith("0002: no answer")
        failed = trainer.outcome()
        assert isinstance(failed.error, errors.StorageStalled)
        assert failed.error.key == "0002"
        for _ in range(3):  # what is stuck for ever does not harm what does not need it
            trainer.begin(ListPlan(2, 1))
            assert trainer.read() == [[b"0000"], [b"0001"]]
        assert len(trainer.reader._quarantine) == 1


def test_what_a_trainer_holds_is_not_overwritten_by_the_next_reader():
    with Trainer(objects(30)) as trainer:
        trainer.begin()
        held = [trainer.outcome() for _ in range(3)]
        for ready in held:
            trainer.take(ready)
        successor = Reader(trainer.storage, trainer.memory, trainer.options)
        trainer.reader.abandon(trainer.taken)
        successor.released(1, held[2].table_at)  # dropped before it was announced
        for ready in held:
            successor.hold(1, ready.table_at, ready.length, ready.samples)
        trainer.reader = successor
        trainer.begin(first_step=3)
        rest = in_batches(sorted(trainer.objects), 3)
        assert trainer.read() == rest[3:]
        assert [trainer.keys(ready) for ready in held[:2]] == rest[:2]
        for ready in held[:2]:
            successor.released(1, ready.table_at)
        assert successor._space.free == len(trainer.memory) - HEADER_BYTES


def test_a_hold_that_lies_outside_the_arena_is_refused():
    with Trainer(objects(3)) as trainer, pytest.raises(ValueError, match="not free"):
        trainer.reader.hold(0, PAGE, 1 << 40, 0)


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 30),
    batch_size=st.integers(1, 5),
    ordered=st.booleans(),
    part_bytes=st.sampled_from([PAGE, 1 << 20]),
    direct=st.booleans(),
    choices=st.lists(st.integers(0, 9), max_size=80),
    ahead=st.none() | st.integers(1, 3),
)
def test_whatever_the_trainer_does_it_gets_every_sample_whole_and_the_arena_back(
    count, batch_size, ordered, part_bytes, direct, choices, ahead
):
    """Held, dropped in any order, abandoned and begun again: no byte is wrong or lost."""
    sized = {name: data[: 1 + 997 * i % 9000] for i, (name, data) in enumerate(
        sorted(objects(count, 9000).items()))}  # fmt: skip
    options = {"ordered": ordered, "part_bytes": part_bytes, "read_ahead_batches": ahead}
    options["direct"] = "fallback" if direct else False
    with Trainer(sized, batch_size=batch_size, **options) as trainer:
        trainer.begin()
        held, got = [], []
        limit = len(trainer.memory) // 3
        while True:
            choice = choices.pop() if choices else 0
            if choice == 9:
                trainer.begin()
                got = []
            while held and (choice in (2, 5) or sum(r.length for r, _, _ in held) > limit):
                ready, names, generation = held.pop(choice % len(held))
                assert trainer.keys(ready) == names
                trainer.reader.released(generation, ready.table_at)
                choice = 0
            outcome = trainer.outcome()
            while isinstance(outcome, Blocked):
                outcome = trainer.outcome()
            if isinstance(outcome, Ended):
                break
            assert isinstance(outcome, Ready), outcome
            trainer.take(outcome)
            names = trainer.keys(outcome)
            held.append((outcome, names, trainer.generation))
            got.append(names)
        expected = in_batches(sorted(sized), batch_size)
        assert (got if ordered else sorted(got)) == expected
        for ready, names, generation in held:
            assert trainer.keys(ready) == names
            trainer.reader.released(generation, ready.table_at)
        deadline = time.monotonic() + 5
        while trainer.reader.settling and time.monotonic() < deadline:
            trainer.reader.advance()
        assert trainer.reader._space.free == len(trainer.memory) - HEADER_BYTES


@settings(max_examples=60, deadline=None)
@given(
    epochs=st.lists(
        st.lists(st.integers(0, 5 * PAGE), min_size=7, max_size=7), min_size=2, max_size=4
    ),
    told=st.none() | st.lists(st.integers(-1, 5 * PAGE), min_size=7, max_size=7),
    batch_size=st.integers(1, 4),
    ordered=st.booleans(),
    deliver=st.booleans(),
)
def test_sizes_that_are_known_and_wrong_are_measured_again(
    epochs, told, batch_size, ordered, deliver
):
    """Learned in an earlier epoch, or told by the catalog; the arena holds few batches at once."""
    sized = {b"%02d" % i: b"" for i in range(7)}
    options = {"batch_size": batch_size, "ordered": ordered, "deliver": deliver}
    with Trainer(sized, memory_bytes=26 * PAGE, **options) as trainer:
        if told is not None:
            sizes = np.array(told, np.int64)
            trainer.catalog = Catalog(b"", trainer.catalog.keys, sizes)
        for sizes in epochs:
            for i, size in enumerate(sizes):
                sized[b"%02d" % i] = np.random.default_rng(size).bytes(size)
            trainer.begin()
            batches = trainer.read()
            assert (batches if ordered else sorted(batches)) == in_batches(
                sorted(sized), batch_size
            )
            while trainer.reader.settling:
                trainer.reader.advance()
            assert trainer.reader._space.free == len(trainer.memory) - HEADER_BYTES
        if told is not None:
            assert trainer.catalog.sizes.tolist() == told  # a node's ranks share them


def test_known_sizes_spare_the_look_at_each_file():
    with Trainer(objects(12)) as trainer:
        for _ in range(3):
            before = trainer.storage.counters()
            trainer.begin()
            trainer.read()
            after = trainer.storage.counters()
            looked = after.metadata_ops - before.metadata_ops
            assert after.reads - before.reads == 12
            assert looked == (24 if before.reads == 0 else 0)


def test_a_file_gone_since_it_was_measured_is_an_error_by_name():
    with Trainer(some := objects(6)) as trainer:
        trainer.begin()
        trainer.read()
        del some[b"0004"]
        trainer.begin()
        ready = trainer.outcome()
        assert isinstance(ready, Ready)
        trainer.drop(ready)
        failed = trainer.outcome()
        assert isinstance(failed, Failed)
        assert failed.step == 1
        assert type(failed.error) is errors.ObjectNotFound
        assert failed.error.key == "0004"
