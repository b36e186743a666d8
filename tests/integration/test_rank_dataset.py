"""RankDataset end to end: real files, a real private Ray, real shared memory."""

import collections
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader

import rayloader
from rayloader import cluster, errors

FILES = 50


def content(number):
    """Unlike any other file's, and of another length."""
    return np.random.default_rng(number).bytes(1000 + 997 * number)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    root = tmp_path_factory.mktemp("train")
    for number in range(FILES):
        below = root / f"part {number % 3}"
        below.mkdir(exist_ok=True)
        (below / f"{number:03}.bin").write_bytes(content(number))
    return root


@pytest.fixture(scope="module", params=["local", "ray"])
def channel(request):
    return request.param


def number_of(key):
    return int(os.path.basename(key)[:3])


def read(dataset):
    """{file number: bytes} of one epoch, each file once; and the order."""
    order = []
    seen = {}
    for batch in dataset:
        for key, sample in zip(batch.keys, batch, strict=True):
            order.append(number_of(key))
            seen[number_of(key)] = sample.numpy().tobytes()
    assert len(seen) == len(order)
    return seen, order


def opened(source, **options):
    return rayloader.RankDataset(source, **{"batch_size": 8, "rank": 0, "world_size": 1, **options})


def test_every_file_arrives_whole_each_epoch_in_another_order(directory, channel):
    with opened(directory, seed=7, channel=channel) as dataset:
        orders = []
        for epoch in range(3):
            dataset.set_epoch(epoch)
            seen, order = read(dataset)
            assert seen == {number: content(number) for number in range(FILES)}
            orders.append(order)
            receipt = dataset.receipt
            assert (receipt.files, receipt.channel, receipt.epoch) == (FILES, channel, epoch)
            assert receipt.bytes == receipt.bytes_transferred == sum(map(len, seen.values()))
            assert receipt.reads == FILES
            assert receipt.bytes_before_clock == 0
            # The root and three directories below it, each opened and read, were listed before.
            assert receipt.metadata_ops_before_clock == (8 if epoch == 0 else 0)
        assert len({tuple(order) for order in orders}) == 3
        hashes = receipt.read_hash
    with opened(directory, shuffle=False, channel=channel) as dataset:
        _, order = read(dataset)
        assert order == sorted(order, key=lambda number: (number % 3, number))
        assert dataset.receipt.read_hash == hashes
        assert dataset.receipt.order_hash != receipt.order_hash


def test_ranks_read_disjoint_shares_in_equal_steps(directory):
    shares = []
    for rank in range(3):
        with opened(directory, rank=rank, world_size=3, batch_size=4, seed=1) as dataset:
            assert len(dataset) == 4
            shares.append(read(dataset)[1])
    assert [len(share) for share in shares] == [16, 16, 16]
    assert len(set().union(*shares)) == 48


def test_no_process_is_made_after_start_up(directory):
    def ours():
        """This process's and its guardian's descendants; orphans become the guardian's."""
        roots = [psutil.Process(), psutil.Process(cluster.guardian().pid)]
        return {child.pid for root in roots for child in root.children(recursive=True)}

    def left_behind():
        places = [Path(tempfile.gettempdir()), Path("/dev/shm")]
        return {str(path) for place in places for path in place.glob("*pymp*")}

    with opened(directory, batch_size=4) as dataset:
        read(dataset)
        reader = dataset.receipt.reader_pid
        before, files = ours(), left_behind()
        assert reader in before
        for epoch in range(1, 11):
            dataset.set_epoch(epoch)
            for _ in dataset:
                assert ours() == before
            assert dataset.receipt.reader_pid == reader
        assert ours() == before
        assert left_behind() <= files


def test_a_batch_is_made_of_views_and_has_names_and_sizes(directory):
    with opened(directory) as dataset:
        batch = next(iter(dataset))
        assert len(batch) == 8
        assert batch.sizes.tolist() == [len(content(number_of(key))) for key in batch.keys]
        assert batch.nbytes == int(batch.sizes.sum())
        first, again = batch[0], batch[0]
        assert first.dtype == torch.uint8
        assert first.dim() == 1
        assert first.data_ptr() == again.data_ptr()
        assert torch.equal(batch[-1], batch[7])
        with pytest.raises(IndexError):
            batch[8]
        assert "8 samples" in repr(batch)


def test_copies_of_a_batch_outlive_the_data_set(directory):
    with opened(directory, shuffle=False) as dataset:
        batch = next(iter(dataset))
        held = batch[2]
        copies = [batch.clone(), pickle.loads(pickle.dumps(batch)), batch.to("cpu")]
        numbers = [number_of(key) for key in batch.keys]
        del batch
    for copy in copies:
        assert [number_of(key) for key in copy.keys] == numbers
        assert [s.numpy().tobytes() for s in copy] == [content(number) for number in numbers]
    assert held.numpy().tobytes() == content(numbers[2])


def test_torch_loads_it_without_a_worker_and_not_with_one(directory):
    with opened(directory) as dataset:
        batches = list(DataLoader(dataset, batch_size=None))
        assert sum(map(len, batches)) == FILES
        with pytest.raises(errors.UsageError, match="actor is the worker"):
            next(iter(DataLoader(dataset, batch_size=None, num_workers=1)))


def test_a_dataloader_that_would_batch_batches_is_told_what_to_do(directory):
    with (
        opened(directory) as dataset,
        pytest.raises(errors.UsageError, match=r"DataLoader\(dataset, batch_size=None"),
    ):
        next(iter(DataLoader(dataset, batch_size=8)))


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP], ids=lambda s: s.name)
def test_a_reader_that_dies_costs_no_sample(directory, channel, blow):
    options = {"read_ahead_batches": 2, "channel": channel}
    with opened(directory, batch_size=2, seed=3, **options) as dataset:
        dataset.set_epoch(5)
        _, expected = read(dataset)
        dataset.set_epoch(5)
        held, order = [], []
        for step, batch in enumerate(dataset):
            held.append((batch[0], number_of(batch.keys[0])))
            order += map(number_of, batch.keys)
            if step in (3, 11):
                os.kill(dataset.receipt.reader_pid, blow)
        assert order == expected
        assert dataset.receipt.restarts == 2
        assert dataset.receipt.files == FILES
        assert all(t.numpy().tobytes() == content(number) for t, number in held)


def test_a_reader_that_keeps_dying_is_reader_lost(directory):
    with opened(directory, batch_size=2, read_ahead_batches=1, max_restarts=0) as dataset:
        batches = iter(dataset)
        next(batches)
        os.kill(dataset.receipt.reader_pid, signal.SIGKILL)
        with pytest.raises(errors.ReaderLost, match="max_restarts=0"):
            collections.deque(batches)


def test_breaking_off_and_beginning_again_reads_the_epoch_from_its_start(directory):
    with opened(directory, batch_size=2) as dataset:
        _, expected = read(dataset)
        for _ in range(5):
            dataset.set_epoch(0)
            for batch in dataset:
                assert number_of(batch.keys[0]) == expected[0]
                break
        dataset.set_epoch(0)
        assert read(dataset)[1] == expected
        assert read(dataset)[1] != expected, "the epoch after an exhausted one is the next"


def test_a_newer_iterator_ends_the_older(directory):
    with opened(directory, batch_size=2) as dataset:
        older, newer = iter(dataset), iter(dataset)
        next(older)
        next(newer)
        with pytest.raises(errors.UsageError, match="newer iterator"):
            next(older)
        assert len(list(newer)) == 24


def test_an_own_list_is_read_in_its_order_with_repeats(directory, channel):
    files = [str(directory / f"part {n % 3}" / f"{n:03}.bin") for n in (5, 3, 5, 9, 1, 0, 3)]
    with opened(None, batch_size=3, channel=channel) as dataset:
        dataset.set_epoch(0, files=files)
        batches = list(dataset)
        assert [key for batch in batches for key in batch.keys] == files
        assert [s.numpy().tobytes() for b in batches for s in b] == [
            content(number_of(key)) for key in files
        ]
        dataset.set_epoch(1, files=files, steps=1)
        assert [len(batch) for batch in dataset] == [3]
        with pytest.raises(errors.OptionError, match="5"):
            dataset.set_epoch(2, files=files, steps=5)


def test_bytes_may_be_dropped_in_the_reader(directory, channel):
    with opened(directory, deliver=False, channel=channel) as dataset:
        sizes = [size for batch in dataset for size in batch.sizes.tolist()]
        assert sorted(sizes) == sorted(len(content(number)) for number in range(FILES))
        assert dataset.receipt.bytes == dataset.receipt.bytes_transferred == sum(sizes)
        dataset.set_epoch(0)
        with pytest.raises(errors.UsageError, match="deliver=False"):
            next(iter(dataset))[0]


def test_large_files_are_read_in_parallel_ranges_within_the_memory(tmp_path, channel):
    parts = 5
    for number in range(4):
        (tmp_path / f"{number:03}.bin").write_bytes(
            np.random.default_rng(number).bytes(parts * 8192 - 100)
        )
    options = {"batch_size": 2, "part_bytes": 8192, "memory_bytes": 100_000, "channel": channel}
    with opened(tmp_path, **options) as dataset:
        for batch in dataset:
            for key, sample in zip(batch.keys, batch, strict=True):
                expected = (tmp_path / key).read_bytes()
                assert sample.numpy().tobytes() == expected
        assert dataset.receipt.reads == 4 * parts
        assert dataset.receipt.memory_bytes <= 102_400


def test_a_batch_that_cannot_fit_names_the_figure_to_set(directory):
    with opened(directory, batch_size=FILES, memory_bytes=1 << 20) as dataset:
        with pytest.raises(errors.BatchTooLarge, match="set memory_bytes to at least") as caught:
            next(iter(dataset))
        wanted = int(str(caught.value).split("at least ")[1].split(", or")[0].replace(",", ""))
    with opened(directory, batch_size=FILES, memory_bytes=wanted) as dataset:
        assert len(next(iter(dataset))) == FILES


def test_batches_kept_for_ever_become_private_copies(directory):
    with opened(directory, batch_size=2, memory_bytes=400_000) as dataset:
        kept = list(dataset)
        assert dataset.receipt.private_copies > 0
        for batch in kept:
            for key, sample in zip(batch.keys, batch, strict=True):
                assert sample.numpy().tobytes() == content(number_of(key))


def test_a_missing_file_is_named_with_its_place(directory, channel):
    files = [str(directory / f"part {n % 3}" / f"{n:03}.bin") for n in range(6)]
    files[4] = str(directory / "gone.bin")
    with opened(None, batch_size=2, channel=channel) as dataset:
        dataset.set_epoch(7, files=files)
        batches = iter(dataset)
        assert len(next(batches)) == len(next(batches)) == 2
        with pytest.raises(errors.ObjectNotFound, match=r"gone\.bin: no such file") as caught:
            next(batches)
        assert "rank 0, epoch 7, batch 2" in caught.value.__notes__
        dataset.set_epoch(8, files=files[:4])
        assert len(list(dataset)) == 2, "the reader goes on"


def test_unreadable_samples_are_left_out_and_listed_when_asked(directory, channel):
    files = [str(directory / f"part {n % 3}" / f"{n:03}.bin") for n in range(6)]
    files[3] = str(directory)
    options = {"on_error": "skip", "skip_budget_share": 0.5, "channel": channel}
    with opened(None, batch_size=2, **options) as dataset:
        dataset.set_epoch(0, files=files)
        assert [len(batch) for batch in dataset] == [2, 1, 2]
        assert [(s.key, s.cause) for s in dataset.receipt.skipped] == [
            (str(directory), "not a regular file")
        ]
        dataset.set_epoch(1, files=[str(directory)] * 6)
        with pytest.raises(errors.SkipBudgetExceeded, match="4 samples could not be read, 3 may"):
            list(dataset)


def test_a_position_is_resumed_exactly(directory):
    with opened(directory, batch_size=3, seed=2) as dataset:
        dataset.set_epoch(4)
        _, expected = read(dataset)
        dataset.set_epoch(4)
        batches = iter(dataset)
        for step in range(1, 4):
            next(batches)
            state = pickle.loads(pickle.dumps(dataset.state_dict()))
            with opened(directory, batch_size=3, seed=2) as other:
                other.load_state_dict(state)
                assert len(other) == 17 - step
                assert read(other)[1] == expected[3 * step :]
                assert other.state_dict()["epoch"] == 5
    with (
        opened(directory, batch_size=3, seed=99) as other,
        pytest.raises(errors.StateMismatch, match="seed=2"),
    ):
        other.load_state_dict(state)


def test_direct_and_cold_reads_give_the_same_bytes_and_are_counted(directory):
    expected = {number: content(number) for number in range(FILES)}
    with opened(directory, direct="fallback", drop_cache=True) as dataset:
        assert read(dataset)[0] == expected
        receipt = dataset.receipt
        assert receipt.cache_dropped_files == FILES
        assert receipt.direct_bytes == receipt.bytes or receipt.direct_fallback_files == FILES


def test_concurrency_may_be_changed_while_an_epoch_runs(directory):
    with opened(directory, batch_size=2) as dataset:
        batches = iter(dataset)
        next(batches)
        dataset.concurrency = 2
        assert sum(map(len, batches)) == FILES - 2
        with pytest.raises(errors.OptionError):
            dataset.concurrency = 0


def test_a_forked_child_may_not_iterate_and_does_not_hold_the_reader(directory):
    with opened(directory, batch_size=2) as dataset:
        batches = iter(dataset)
        next(batches)
        pid = os.fork()
        if pid == 0:
            try:
                next(batches)
            except errors.UsageError:
                os._exit(7)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert sum(map(len, batches)) == FILES - 2


def test_unordered_delivers_the_same_files(directory):
    with opened(directory, ordered=False, batch_size=2) as dataset:
        seen, _ = read(dataset)
        assert len(seen) == FILES


def test_a_position_outlives_the_loop_that_was_left(directory):
    with opened(directory, batch_size=2) as dataset:
        _, expected = read(dataset)
        dataset.set_epoch(0)
        for step, _ in enumerate(dataset):
            if step == 6:
                break
        receipt = dataset.receipt
        assert receipt.steps == 7
        assert dataset.receipt.seconds == receipt.seconds, "the clock stands still"
        state = dataset.state_dict()
        assert (state["epoch"], state["step"]) == (0, 7)
        dataset.load_state_dict(state)
        assert read(dataset)[1] == expected[14:]


def test_a_malformed_word_from_the_trainer_ends_only_that_reader(directory):
    with opened(directory, batch_size=2, read_ahead_batches=1) as dataset:
        _, expected = read(dataset)
        dataset.set_epoch(0)
        order = []
        for step, batch in enumerate(dataset):
            order += map(number_of, batch.keys)
            if step == 4:
                channel = dataset._loader._remote._owned.channel
                channel._connection.send(b"not one of our packets")
        assert order == expected
        assert dataset.receipt.restarts == 1


def test_what_is_said_during_an_iteration_counts_for_the_next(directory):
    with opened(directory, batch_size=10) as dataset:
        batches = iter(dataset)
        next(batches)
        dataset.set_epoch(7)
        assert dataset.state_dict()["epoch"] == 0, "the running one still counts"
        assert len(list(batches)) == 4
        assert dataset.state_dict()["epoch"] == 7
        batches = iter(dataset)
        next(batches)
        dataset.set_epoch(5)
        batches = iter(dataset)
        assert (dataset.state_dict()["epoch"], dataset.state_dict()["step"]) == (5, 0)
        assert next(batches).epoch == 5


def test_a_loaded_state_ends_what_was_running(directory):
    with opened(directory, batch_size=10, seed=4) as dataset:
        _, expected = read(dataset)
        dataset.set_epoch(0)
        batches = iter(dataset)
        next(batches)
        state = dataset.state_dict()
        next(batches)
        dataset.load_state_dict(state)
        with pytest.raises(errors.UsageError, match="given another state"):
            next(batches)
        assert read(dataset)[1] == expected[10:]


def test_a_left_epoch_is_read_no_further(tmp_path, channel):
    for number in range(20):
        (tmp_path / f"{number:03}.bin").write_bytes(bytes(1_000_000))
    with opened(tmp_path, batch_size=1, channel=channel) as dataset:
        for _ in dataset:
            break
        left = dataset.receipt
        time.sleep(1)
        assert sum(map(len, dataset)) == 20
        receipt = dataset.receipt
        # What was under way when it was left belongs to nobody, and is told.
        assert left.bytes_transferred + receipt.bytes_before_clock <= 20_000_000
        assert receipt.bytes_transferred == 20_000_000


def test_between_lists_there_is_a_position_and_nothing_else(directory):
    files = [str(directory / f"part {n % 3}" / f"{n:03}.bin") for n in range(6)]
    with opened(None, batch_size=2) as dataset:
        assert dataset.state_dict()["step"] == 0
        dataset.set_epoch(3, files=files)
        batches = iter(dataset)
        next(batches)
        inside = dataset.state_dict()
        assert len(list(batches)) == 2
        between = dataset.state_dict()
        assert (between["epoch"], between["step"], between["explicit"]) == (4, 0, False)
        dataset.load_state_dict(between)
        dataset.set_epoch(4, files=files)
        assert len(list(dataset)) == 3
        dataset.load_state_dict(inside)
        assert dataset.state_dict() == inside
        with pytest.raises(errors.StateMismatch, match="saved with the list of digest"):
            dataset.set_epoch(3, files=files[1:])
        with pytest.raises(errors.StateMismatch, match="files="):
            next(iter(dataset))
        dataset.set_epoch(3, files=files)
        assert [key for batch in dataset for key in batch.keys] == files[2:]


def test_a_position_in_the_catalog_is_no_position_in_a_list(directory):
    files = [str(directory / f"part {n % 3}" / f"{n:03}.bin") for n in range(9)]
    with opened(directory, batch_size=2) as dataset:
        batches = iter(dataset)
        next(batches)
        dataset.load_state_dict(dataset.state_dict())
        with pytest.raises(errors.StateMismatch, match="no list of its own"):
            dataset.set_epoch(0, files=files)
        dataset.set_epoch(1, files=files)
        assert len(dataset) == 5


def test_the_rank_that_is_given_wins_over_a_broken_environment(directory, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert opened(directory, rank=0, world_size=1).rank == 0
    with pytest.raises(errors.OptionError, match="WORLD_SIZE"):
        rayloader.RankDataset(directory)


def test_a_batch_that_is_dropped_is_free_at_once(directory):
    with opened(directory) as dataset:
        batches = iter(dataset)
        batch = next(batches)
        memory = dataset._loader._remote._owned.memory
        assert memory.held_bytes > 0
        del batch
        assert memory.held_bytes == 0


def test_a_data_set_does_not_travel(directory):
    with pytest.raises(errors.UsageError, match="actor is the worker"):
        pickle.dumps(opened(directory))


def test_a_batch_is_pinned_only_where_there_is_something_to_pin_for(directory):
    with opened(directory) as dataset:
        batch = next(iter(dataset))
        assert not batch.is_pinned()
        if torch.cuda.is_available():
            assert batch.pin_memory().is_pinned()
            assert [s.numpy().tobytes() for s in batch] == [
                content(number_of(key)) for key in batch.keys
            ]
        else:
            with pytest.raises(RuntimeError):
                batch.pin_memory()
            assert batch[0].numpy().tobytes() == content(number_of(batch.keys[0]))


def test_a_restart_does_not_mind_a_thousand_open_files(directory):
    with opened(directory, batch_size=2, read_ahead_batches=1) as dataset:
        batches = iter(dataset)
        next(batches)
        files = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
        try:
            os.kill(dataset.receipt.reader_pid, signal.SIGKILL)
            assert sum(map(len, batches)) == FILES - 2
        finally:
            for fd in files:
                os.close(fd)


RANKS = """
import os, sys, time
import rayloader

directory = sys.argv[1]
rank = int(os.environ["RANK"])

def meet(name):
    open(f"{directory}.{name}.{rank}", "w").close()
    while not os.path.exists(f"{directory}.{name}.{1 - rank}"):
        time.sleep(0.01)

def files(dataset):
    with dataset:
        return sum(map(len, dataset)), dataset.receipt.metadata_ops_before_clock

names = [os.path.join(directory, name) for name in sorted(os.listdir(directory))]
assert files(rayloader.RankDataset(names[:4]))[0] == 2
assert files(rayloader.RankDataset(names[4:]))[0] == 3
count, listed = files(rayloader.RankDataset(directory))
assert count == 5
print("listed", listed, flush=True)
meet("before")
if rank == 0:
    for more in "xy":
        open(os.path.join(directory, more), "w").close()
meet("after")
assert files(rayloader.RankDataset(directory))[0] == 6
mismatched = rayloader.RankDataset(names[rank:])
try:
    mismatched.open()
    meet("opened")
    next(iter(mismatched))
except rayloader.CatalogMismatch:
    print("mismatch", flush=True)
    meet("opened")
"""


def test_ranks_of_a_node_list_once_each_time_and_agree(tmp_path):
    directory = tmp_path / "train"
    directory.mkdir()
    for number in range(10):
        (directory / f"{number}.bin").write_bytes(content(number))
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ran = subprocess.run(
        [*command, script, directory], capture_output=True, text=True, timeout=55, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert sorted(line for line in ran.stdout.splitlines() if "listed" in line) == [
        "listed 0", "listed 2",
    ]  # fmt: skip
    assert ran.stdout.count("mismatch") == 2
