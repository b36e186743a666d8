"""A trainer that is killed, interrupted or careless leaves nothing behind and spoils nothing."""

import asyncio
import contextlib
import gc
import multiprocessing
import os
import random
import select
import signal
import threading
import time

import numpy as np
import pytest
import torch

import rayloader
from tests.faults import campaign

FILES = campaign.FILES
INTERRUPTS = 25


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    root = tmp_path_factory.mktemp("files")
    campaign.make_files(root)
    return str(root)


@pytest.fixture(scope="module")
def shared(directory):
    """One open data set for the tests that need no fresh one; its arena holds 512 KiB."""
    with opened(directory, memory_bytes=1 << 19) as dataset:
        yield dataset


def opened(source, **options):
    return rayloader.RankDataset(source, **{"batch_size": 2, "rank": 0, "world_size": 1, **options})


def numbers(batches):
    return [int(key[:3]) for batch in batches for key in batch.keys]


def require_whole_epoch(dataset):
    """An epoch from its start gives every file once, with the right bytes."""
    seen = []
    for batch in dataset:
        seen += numbers([batch])
        for number, sample in zip(numbers([batch]), batch, strict=True):
            assert sample.numpy().tobytes() == campaign.content(number)
    assert sorted(seen) == list(range(FILES))


def held_bytes(dataset):
    gc.collect()
    return dataset._loader._remote._owned.memory.held_bytes


# Interrupted


# Python forgets an interrupt that strikes as a finalizer begins: one in some hundred of these.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_at_any_moment_leaves_a_data_set_that_works(directory):
    chance = random.Random(5)
    with opened(directory, read_ahead_batches=2, memory_bytes=1 << 20) as dataset:
        dataset.set_epoch(0)
        expected = numbers(dataset)
        main = threading.main_thread().ident
        for _ in range(INTERRUPTS):
            dataset.set_epoch(0)
            got = []
            timer = threading.Timer(
                chance.uniform(0, 0.05), signal.pthread_kill, [main, signal.SIGINT]
            )
            timer.start()
            with contextlib.suppress(KeyboardInterrupt):
                for batch in dataset:
                    got += numbers([batch])
                    time.sleep(0.001)
                timer.join()
                time.sleep(0.1)
            assert got == expected[: len(got)]
            state = dataset.state_dict()
            if state["epoch"] == 0:
                # At most the batch that was on its way when it struck has been counted.
                assert len(got) <= 2 * state["step"] <= len(got) + 2
                dataset.load_state_dict(state)
                assert numbers(dataset) == expected[2 * state["step"] :]
        dataset.set_epoch(0)
        require_whole_epoch(dataset)


def test_an_exception_in_the_loop_leaves_the_position_and_the_data_set(shared):
    shared.set_epoch(3)
    expected = numbers(shared)
    shared.set_epoch(3)
    got = []

    def train():
        for batch in shared:
            got.extend(numbers([batch]))
            if len(got) == 20:
                raise ArithmeticError

    with pytest.raises(ArithmeticError):
        train()
    state = shared.state_dict()
    assert (state["epoch"], state["step"]) == (3, 10)
    shared.load_state_dict(state)
    assert numbers(shared) == expected[20:]
    shared.set_epoch(4)
    require_whole_epoch(shared)


# Iterators


def test_breaking_off_at_random_and_iterating_again(shared):
    chance = random.Random(7)
    for epoch in range(30):
        shared.set_epoch(epoch)
        stop = chance.randrange(0, 30)
        for step, _batch in enumerate(shared):
            if step == stop:
                break
    del _batch
    shared.set_epoch(99)
    require_whole_epoch(shared)
    assert held_bytes(shared) == 0


def test_iterators_that_are_never_finished(shared):
    left = []
    for _ in range(20):
        batches = iter(shared)
        next(batches)
        left.append(batches)
    shared.set_epoch(1)
    require_whole_epoch(shared)
    for batches in left:
        with pytest.raises(rayloader.UsageError, match="this iterator has ended"):
            next(batches)
    left.clear()
    shared.set_epoch(2)
    require_whole_epoch(shared)


def test_a_data_set_that_is_forgotten_ends_its_reader(directory):
    dataset = opened(directory)
    batches = iter(dataset)
    kept = next(batches)
    number = numbers([kept])[0]
    life = os.pidfd_open(dataset.receipt.reader_pid)
    del dataset, batches
    gc.collect()
    assert select.select([life], [], [], campaign.promised(2))[0], "the reader lives on"
    os.close(life)
    assert kept[0].numpy().tobytes() == campaign.content(number)


# Batches


DERIVATIONS = {
    "itself": lambda sample: sample,
    "detach": lambda sample: sample.detach(),
    "data": lambda sample: sample.data,
    "slice": lambda sample: sample[100:-100][::2],
    "numpy": lambda sample: sample.numpy(),
    "numpy slice": lambda sample: sample.numpy()[7:],
    "memoryview": lambda sample: memoryview(sample.numpy()),
    "storage": lambda sample: sample.untyped_storage(),
    "view": lambda sample: sample.view(torch.int8),
    "unbind": lambda sample: sample.split(1000)[-1],
    "as_strided": lambda sample: torch.as_strided(sample, (5,), (3,), sample.storage_offset()),
    "dlpack": lambda sample: torch.from_dlpack(sample),
    "numpy round trip": lambda sample: torch.from_numpy(sample.numpy()),
    "parameter": lambda sample: torch.nn.Parameter(sample, requires_grad=False),
}


def copied(derived):
    """What a derivation shows now, in private memory."""
    if isinstance(derived, torch.UntypedStorage):
        derived = torch.tensor([], dtype=torch.uint8).set_(derived)
    if isinstance(derived, torch.Tensor):
        derived = derived.numpy()
    return bytes(np.ascontiguousarray(derived))


@pytest.mark.parametrize("name", DERIVATIONS)
def test_whatever_is_made_of_a_batch_keeps_it_intact_and_no_longer(shared, name):
    shared.set_epoch(0)
    batch = next(batch for batch in shared if min(batch.sizes) > 2000)
    derived = DERIVATIONS[name](batch[1])
    before = copied(derived)
    del batch
    for epoch in (1, 2):
        shared.set_epoch(epoch)
        require_whole_epoch(shared)
    assert copied(derived) == before
    assert held_bytes(shared) > 0
    del derived
    assert held_bytes(shared) == 0


def test_batches_kept_for_ever_do_not_stop_the_stream(shared):
    kept = []
    for epoch in range(3):
        shared.set_epoch(epoch)
        kept += list(shared)
    assert shared.receipt.private_copies > 0
    for batch in kept:
        for number, sample in zip(numbers([batch]), batch, strict=True):
            assert sample.numpy().tobytes() == campaign.content(number)
    del kept, batch, sample
    assert held_bytes(shared) == 0


def test_writing_into_a_batch_spoils_no_other(shared):
    shared.set_epoch(0)
    held = []
    for batch in shared:
        for sample, number in zip(batch, numbers([batch]), strict=True):
            assert sample.numpy().tobytes() == campaign.content(number)
            sample.bitwise_not_()
        held = [*held[-3:], batch]
    for batch in held:
        for sample, number in zip(batch, numbers([batch]), strict=True):
            assert (~sample).numpy().tobytes() == campaign.content(number)
    del held, batch, sample
    shared.set_epoch(1)
    require_whole_epoch(shared)


def _receive(pipe):
    """In another process: what arrived, as bytes, by file number."""
    batch = pipe.recv()
    pipe.send({n: s.numpy().tobytes() for n, s in zip(numbers([batch]), batch, strict=True)})
    sample = pipe.recv()
    pipe.send(sample.numpy().tobytes())


@pytest.mark.parametrize(
    "module", [multiprocessing, torch.multiprocessing], ids=["pickle", "torch"]
)
def test_batches_and_samples_may_be_sent_to_another_process(shared, module):
    context = module.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_receive, args=[theirs], daemon=True)
    child.start()
    shared.set_epoch(0)
    batch = next(batch for batch in shared if min(batch.sizes) > 0)
    number = numbers([batch])[0]
    for sent in (batch, batch[0]):
        ours.send(sent)
        assert ours.poll(20)
        arrived = ours.recv()
        wanted = {n: campaign.content(n) for n in numbers([batch])}
        assert arrived == (wanted if sent is batch else wanted[number])
    child.join(10)
    assert child.exitcode == 0
    del batch, sent
    shared.set_epoch(1)
    require_whole_epoch(shared)
    assert held_bytes(shared) == 0


def test_batches_that_a_forked_child_drops_stay_the_trainers(shared):
    shared.set_epoch(0)
    batches = iter(shared)
    held = [next(batches) for _ in range(3)]
    wanted = [(n, s) for b in held for n, s in zip(numbers([b]), b, strict=True)]
    pid = os.fork()
    if pid == 0:
        try:
            held.clear()
            wanted.clear()
            gc.collect()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    list(batches)
    shared.set_epoch(1)
    list(shared)
    assert all(s.numpy().tobytes() == campaign.content(n) for n, s in wanted)


# Surroundings


def test_a_data_set_may_be_used_from_a_thread(directory):
    failed = []

    def work():
        try:
            with opened(directory) as dataset:
                for epoch in range(2):
                    dataset.set_epoch(epoch)
                    require_whole_epoch(dataset)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert not failed
    assert not any(thread.is_alive() for thread in threads)


def test_batches_may_be_dropped_in_other_threads(shared):
    import queue

    taken = queue.Queue(maxsize=3)
    spoilt = []

    def consume():
        while (batch := taken.get()) is not None:
            for number, sample in zip(numbers([batch]), batch, strict=True):
                if sample.numpy().tobytes() != campaign.content(number):
                    spoilt.append(number)

    threads = [threading.Thread(target=consume) for _ in range(3)]
    for thread in threads:
        thread.start()
    for epoch in range(4):
        shared.set_epoch(epoch)
        for batch in shared:
            taken.put(batch)
    for _ in threads:
        taken.put(None)
    for thread in threads:
        thread.join(20)
    assert spoilt == []
    del batch
    assert held_bytes(shared) == 0


def test_a_data_set_may_be_used_inside_a_running_event_loop(directory):
    async def train():
        with opened(directory) as dataset:
            require_whole_epoch(dataset)
            await asyncio.sleep(0)
            batches = iter(dataset)
            assert len(await asyncio.to_thread(next, batches)) == 2

    asyncio.run(train())


def test_two_data_sets_at_once_do_not_meet(shared, directory):
    with opened(directory, batch_size=3, seed=4) as other:
        shared.set_epoch(0)
        other.set_epoch(0)
        seen = [[], []]
        for one, two in zip(shared, other, strict=False):
            seen[0] += numbers([one])
            seen[1] += numbers([two])
    assert len(seen[1]) == len(set(seen[1])) == FILES
    assert len(seen[0]) == len(set(seen[0]))


@pytest.mark.timeout(120)
def test_many_data_sets_opened_and_closed_leave_this_process_as_it_was(shared, directory):
    campaign.many_data_sets(directory, 12, campaign.promised(2))


def test_nothing_above_has_cost_the_shared_data_set_its_reader(shared):
    shared.set_epoch(0)
    require_whole_epoch(shared)
    assert shared.receipt.restarts == 0
