"""A Fleet end to end: real actors and readers, changed and killed while they read."""

import os
import signal
import threading
import time

import numpy as np
import pytest

import rayloader
from rayloader import cluster, errors
from rayloader.catalog import Catalog
from rayloader.receipt import Fingerprint, name_hashes
from tests.census import read

FILES = 203
DRIVER = """
import os, sys, rayloader
fleet = rayloader.Fleet(sys.argv[1], ranks=2, batch_size=4, compute_seconds=float(sys.argv[2]))
fleet.open()
print("open", *fleet.pids, flush=True)
try:
    fleet.run_epoch()
except KeyboardInterrupt:
    sys.exit(130)
"""


def file(number):
    return np.random.default_rng(number).bytes(500 + number)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    root = tmp_path_factory.mktemp("train")
    for number in range(FILES):
        (root / f"{number:03}.bin").write_bytes(file(number))
    return root


@pytest.fixture(scope="module")
def everything(directory):
    """The fingerprint and the bytes of an epoch that reads each sample once."""
    catalog = Catalog.from_source(directory)
    hashes = name_hashes(*catalog.blob_at(np.arange(FILES)))
    return f"{Fingerprint.of(hashes).content:016x}", sum(len(file(i)) for i in range(FILES))


@pytest.fixture(scope="module")
def fleet(directory):
    with rayloader.Fleet(directory, ranks=2, batch_size=4, progress=False) as one:
        yield one
    cluster.shutdown()


@pytest.fixture(autouse=True)
def as_it_was(fleet):
    fleet.compute_seconds = 0
    fleet.touch = False


def require_each_once(report, everything):
    assert (report.files, report.read_hash, report.bytes) == (FILES, everything[0], everything[1])


def ended(pid):
    """Whether a process is gone, or waits only for its parent to hear of it."""
    try:
        return read(f"/proc/{pid}/stat").rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except OSError:
        return True


def until_reading(fleet, steps=3):
    """Wait until a slow epoch is some steps on."""
    time.sleep(fleet.compute_seconds * steps + 0.3)


def test_an_epoch_reads_every_sample_once_and_reports_per_rank_and_in_total(fleet, everything):
    report = fleet.run_epoch()
    require_each_once(report, everything)
    assert [rank.rank for rank in report.ranks] == [0, 1]
    assert [rank.total("files") for rank in report.ranks] == [102, 101]
    assert [rank.pids for rank in report.ranks] == [(pid,) for pid in fleet.pids]
    assert report.bytes_per_second == pytest.approx(report.bytes / report.seconds)
    assert report.events == ()
    for shown in (str(report), report._repr_html_()):
        for word in ("rank", "all", "203", *map(str, fleet.pids)):
            assert word in shown
    assert report.asdict()["ranks"][1]["receipts"][0]["rank"] == 1
    assert str(fleet.pids[0]) in fleet._repr_html_()
    assert repr(report).startswith(f"EpochReport(epoch {report.epoch}, 2 ranks, 203 files")


def test_epochs_count_up_and_differ_in_their_order(fleet):
    one, other = fleet.run_epoch(7), fleet.run_epoch()
    assert (one.epoch, other.epoch) == (7, 8)
    orders = [report.ranks[0].receipts[0]["order_hash"] for report in (one, other)]
    assert orders[0] != orders[1]


def test_scaled_between_epochs_the_ranks_that_stay_keep_their_processes(fleet, everything):
    before = fleet.pids
    readers = [rank.reader_pids for rank in fleet.run_epoch().ranks]
    fleet.scale(3)
    report = fleet.run_epoch()
    require_each_once(report, everything)
    assert fleet.pids[:2] == before
    assert [rank.reader_pids for rank in report.ranks][:2] == readers
    third = fleet.pids[2]
    fleet.scale(ranks=2)
    assert fleet.pids == before
    assert ended(third)
    require_each_once(fleet.run_epoch(), everything)


def test_starting_ranks_asks_ray_for_its_nodes_once_however_many_they_are(fleet, monkeypatch):
    import ray

    asked, nodes = [], ray.nodes
    monkeypatch.setattr(ray, "nodes", lambda: asked.append(1) or nodes())
    fleet.scale(4)
    assert len(asked) == 1
    fleet.scale(2)


def test_scaled_while_an_epoch_runs_what_is_left_is_dealt_out_anew(fleet, everything):
    before = fleet.pids
    fleet.scale(3)
    fleet.compute_seconds = 0.1
    running = fleet.start_epoch()
    until_reading(fleet)
    fleet.scale(2)
    assert running.alive
    report = running.report()
    require_each_once(report, everything)
    assert fleet.pids == before
    (event,) = report.events
    assert event.startswith("3 ranks became 2 after ")
    assert {part.world_size for part in report.outcome.parts} == {3, 2}

    fleet.compute_seconds = 0.3
    running = fleet.start_epoch()
    until_reading(fleet, 1)
    fleet.scale(3)
    assert running.alive
    report = running.report()
    require_each_once(report, everything)
    assert report.events[0].startswith("2 ranks became 3 after ")
    assert [len(rank.parts) for rank in report.ranks] == [2, 2, 1]
    fleet.scale(2)
    assert fleet.pids == before


def test_ranks_that_are_to_go_finish_the_last_step_first(directory, everything):
    """Every rank has but one step, and has begun it: there is nothing to deal out anew."""
    with rayloader.Fleet(directory, ranks=3, batch_size=FILES, progress=False) as one:
        one.compute_seconds = 1.0
        running = one.start_epoch()
        time.sleep(0.3)
        one.scale(ranks=2)
        require_each_once(running.report(), everything)
        assert len(one.pids) == 2


def test_a_consumer_that_dies_is_replaced_and_each_sample_counts_once(fleet, everything):
    fleet.compute_seconds = 0.1
    running = fleet.start_epoch()
    until_reading(fleet, 5)
    kept, killed = fleet.pids
    os.kill(killed, signal.SIGKILL)
    report = running.report()
    require_each_once(report, everything)
    assert fleet.pids[0] == kept
    assert report.ranks[1].pids == (killed, fleet.pids[1])
    (event,) = report.events
    assert event.startswith(f"the consumer of rank 1 died (process {killed} on ")
    assert "went on from step" in event


def test_a_consumer_that_died_between_epochs_is_replaced_too(fleet, everything):
    os.kill(fleet.pids[0], signal.SIGKILL)
    report = fleet.run_epoch()
    require_each_once(report, everything)
    assert "the consumer of rank 0 died" in report.events[0]


def test_a_reader_that_dies_is_replaced_and_the_report_says_so(fleet, everything):
    (first,) = fleet.run_epoch().ranks[0].reader_pids
    fleet.compute_seconds = 0.05
    running = fleet.start_epoch()
    until_reading(fleet)
    os.kill(first, signal.SIGKILL)
    report = running.report()
    require_each_once(report, everything)
    assert report.total("restarts") == 1
    assert report.events[-1] == "the reader of rank 0 was started again once"


def test_concurrency_changes_while_an_epoch_runs(fleet):
    fleet.compute_seconds = 0.02
    running = fleet.start_epoch()
    until_reading(fleet)
    fleet.concurrency = 5
    assert [rank.receipts[-1]["concurrency"] for rank in running.report().ranks] == [5, 5]
    fleet.concurrency = 64
    assert fleet.options.concurrency == 64


def test_the_training_step_is_imitated_and_bytes_are_looked_at(fleet):
    fleet.compute_seconds, fleet.touch = 0.02, True
    report = fleet.run_epoch()
    assert report.seconds >= 26 * 0.02
    assert report.stall_share < 0.5


def test_a_rank_that_fails_ends_the_epoch_and_the_fleet_can_go_on(fleet, directory, everything):
    gone = directory / "100.bin"
    gone.rename(directory / ".away")
    try:
        with pytest.raises(errors.ObjectNotFound, match=r"100\.bin"):
            fleet.run_epoch()
    finally:
        (directory / ".away").rename(gone)
    require_each_once(fleet.run_epoch(), everything)


def test_an_epoch_can_be_stopped_and_two_do_not_run_at_once(fleet, everything):
    fleet.compute_seconds = 0.2
    running = fleet.start_epoch()
    with pytest.raises(errors.UsageError, match="an epoch is running"):
        fleet.run_epoch()
    running.stop()
    with pytest.raises(errors.UsageError, match="was stopped"):
        running.report()
    fleet.compute_seconds = 0
    require_each_once(fleet.run_epoch(), everything)


def test_a_change_that_comes_when_an_epoch_ends_counts_for_the_next(fleet, everything):
    running = fleet.start_epoch()
    scaling = threading.Thread(target=fleet.scale, args=(1,))
    scaling.start()
    require_each_once(running.report(), everything)
    scaling.join()
    require_each_once(fleet.run_epoch(), everything)
    assert len(fleet.pids) == 1
    fleet.scale(2)


def test_nothing_is_delivered_where_the_reader_drops_it_nor_in_order_where_not_asked(
    directory, everything
):
    with rayloader.Fleet(
        directory, ranks=1, deliver=False, ordered=False, batch_size=4, progress=False
    ) as one:
        require_each_once(one.run_epoch(), everything)
        one.compute_seconds = 0.2
        running = one.start_epoch()
        with pytest.raises(errors.OptionError, match="between two epochs"):
            one.scale(2)
        running.stop()
        with pytest.raises(errors.OptionError, match="touch"):
            one.touch = True
    with pytest.raises(errors.UsageError, match="closed"):
        one.run_epoch()


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"ranks": 0}, errors.OptionError, "ranks=0"),
        ({"batchsize": 4}, errors.OptionError, "batch_size"),
        ({"compute_seconds": -1}, errors.OptionError, "compute_seconds=-1"),
        ({"ranks": 204}, errors.EmptyCatalog, "203 entries are too few for 204 ranks"),
    ],
)
def test_what_cannot_work_is_said_before_anything_starts(directory, given, error, text):
    with pytest.raises(error, match=text):
        rayloader.Fleet(directory, **given).open()


def test_a_driver_that_is_interrupted_leaves_nothing(directory, census):
    driver = census.start(DRIVER, str(directory), "1")
    assert driver.line(40).startswith("open ")
    time.sleep(1)
    driver.popen.send_signal(signal.SIGINT)
    status, text = driver.wait(30)
    assert status == 130, text
    census.gone(15)


TWO_NODES = """
import sys, time
import ray
from ray.cluster_utils import Cluster
nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
second = nodes.add_node(num_cpus=1)
ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")
import rayloader
with rayloader.Fleet(sys.argv[1], ranks=3, batch_size=4, progress=False) as fleet:
    fleet.run_epoch()  # all have found their files, and begin the next epoch at once
    fleet.compute_seconds = 0.1
    running = fleet.start_epoch()
    time.sleep(0.8)
    nodes.remove_node(second)
    report = running.report()
    where = [[part.hello.node_id for part in rank.parts] for rank in report.ranks]
    print("READ", report.files, report.read_hash, [len(set(them)) for them in where],
          len({them[-1] for them in where}), *report.events, sep="|", flush=True)
nodes.shutdown()
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_ranks_are_spread_over_nodes_and_survive_the_loss_of_one(directory, everything, census):
    driver = census.start(TWO_NODES, str(directory), RAY_AUTH_MODE="disabled")
    line = ""
    while not line.startswith("READ"):
        line = driver.line(80)
    _, files, read_hash, nodes_of_each_rank, nodes_at_the_end, *events = line.split("|")
    assert (int(files), read_hash) == (FILES, everything[0])
    assert nodes_of_each_rank == "[1, 2, 1]"
    assert nodes_at_the_end == "1"
    assert "the consumer of rank 1 died" in events[-1]


AFTERWARDS = """
import sys, rayloader
with rayloader.RankDataset(sys.argv[1]) as dataset:
    next(iter(dataset))
rayloader.shutdown()
import ray
try:
    ray.put(1)
except Exception as refused:
    print("refused", flush=True)
"""


def test_a_call_of_ray_after_its_end_starts_no_other(directory, census):
    late = census.start(AFTERWARDS, str(directory))
    assert late.line(40) == "refused"
    late.wait(30)
    census.gone(15)
