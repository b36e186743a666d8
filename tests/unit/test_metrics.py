"""What a reader tells of itself, without a Ray to tell it to."""

import threading

import pytest

from rayloader import metrics
from rayloader.arena import HEADER_BYTES
from rayloader.channel.serve import QueueLink, ReaderLoop
from rayloader.reader import Ended
from rayloader.storage import latency_bucket
from rayloader.tally import Tally, TallyPage
from tests.unit.test_reader import Trainer


@pytest.fixture
def page():
    return TallyPage(memoryview(bytearray(HEADER_BYTES)))


def test_what_a_trainer_counts_is_taken_once(page):
    page.add(Tally(stall_ns=5, batches=1, files=24, bytes=240))
    page.add(Tally(batches=1, files=23, bytes=230, skipped=1))
    assert page.take() == Tally(5, 2, 47, 470, 1)
    assert page.take() == Tally()
    page.add(Tally(restarts=1))
    assert page.take() == Tally(restarts=1)


def test_another_arena_goes_on_counting_and_what_was_taken_stays_taken(page):
    page.add(Tally(files=3))
    page.take()
    page.add(Tally(errors=1))
    other = TallyPage(memoryview(bytearray(HEADER_BYTES)))
    page.move_to(other)
    assert other.take() == Tally(errors=1)


def test_a_tally_leaves_the_readers_counts_in_the_same_page_alone():
    with Trainer({b"%d" % i: bytes(10) for i in range(6)}) as trainer:
        tally = TallyPage(trainer.memory)
        tally.add(Tally(*range(1, 8)))
        trainer.begin()
        for step in range(2):
            trainer.drop(trainer.outcome())
            tally.add(Tally(batches=1, files=3))
            assert step < 2
        assert trainer.outcome() == Ended(2)
        assert tally.take() == Tally(1, 4, 9, 4, 5, 6, 7)


def test_a_readers_figures_name_its_rank_epoch_and_storage_and_take_the_tally():
    with Trainer({b"%d" % i: bytes(10) for i in range(3)}) as trainer:
        assert trainer.reader.figures() is None
        trainer.begin()
        trainer.drop(trainer.outcome())
        TallyPage(trainer.memory).add(Tally(files=3))
        figures = trainer.reader.figures()
        assert (figures.rank, figures.epoch, figures.storage) == (0, 0, "file")
        assert (figures.counters.reads, figures.counters.bytes_transferred) == (3, 30)
        assert (figures.counters.in_flight, figures.oldest_seconds) == (0, 0.0)
        assert figures.concurrency == 64
        assert (figures.tally.files, trainer.reader.figures().tally.files) == (3, 0)


class UntilToldSo(QueueLink):
    over = False

    def listen(self, reader, ready):
        return not self.over

    def end(self):
        self.over = True


def test_a_loop_is_asked_from_another_thread_and_survives_what_that_raises():
    with Trainer({b"a": bytes(10)}) as trainer:
        link = UntilToldSo(trainer.memory)
        loop = ReaderLoop(trainer.reader, trainer.storage.fileno(), trainer.catalog, link)
        thread = threading.Thread(target=loop.run)
        thread.start()
        with pytest.raises(ZeroDivisionError):
            loop.ask(lambda: 1 // 0)
        assert loop.ask(threading.current_thread) is thread
        loop.ask(link.end)
        loop.call(int)
        thread.join()


def test_latencies_are_counted_by_the_longest_that_they_may_have_been():
    before, now = [0] * 128, [0] * 128
    for seconds in (1e-6, 63e-6, 65e-6, 0.005, 0.005, 200.0, 1e9):
        now[latency_bucket(seconds)] += 1
    counts = metrics.latency_counts(before, now)
    edges = [float(edge) for edge in counts]
    assert edges == sorted(edges)
    assert (edges[0], edges[-1]) == (64e-6, float("inf"))
    assert (counts["6.4e-05"], counts["0.000128"]) == (2, 3)
    assert (counts["0.004096"], counts["0.008192"]) == (3, 5)
    assert counts["+Inf"] == 7
    now[latency_bucket(0.005)] += 1
    assert metrics.latency_counts(now, now)["+Inf"] == 0


@pytest.mark.parametrize(
    ("said", "expected"),
    [(None, True), ("1", True), ("true", True), ("false", False), ("0", False)],
)
def test_nothing_is_published_where_ray_collects_no_metrics(said, expected):
    environ = {} if said is None else {"RAY_enable_metrics_collection": said}
    assert metrics.wanted(environ) is expected
