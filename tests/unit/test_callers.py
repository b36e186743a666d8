"""Threads that wait: as many as there are calls at once."""

import contextlib
import threading
import time

import pytest

from rayloader.storage.callers import Callers


@pytest.fixture
def callers():
    with contextlib.ExitStack() as opened:
        one = Callers()
        opened.callback(one.close, 5)
        yield one


class Work:
    """Ends when it is told to."""

    def __init__(self, callers):
        self.may_end, self.has_ended = threading.Event(), threading.Event()
        self.thread = None
        self.call = callers.call(self._work, lambda _: self.has_ended.set())

    def _work(self, _):
        self.thread = threading.current_thread()
        assert self.may_end.wait(10)
        return "done"

    def end(self):
        self.may_end.set()
        assert self.has_ended.wait(5)


def no_thread(_):
    raise RuntimeError("can't start new thread")


def until(condition, seconds=5):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert condition()


def test_one_call_after_the_other_is_done_by_one_thread(callers):
    for _ in range(5):
        work = Work(callers)
        work.end()
        assert work.call.result() == "done"
        assert work.call.exception() is None
    assert len(callers._threads) == 1


def test_there_are_as_many_threads_as_calls_at_once_and_no_more(callers):
    for _ in range(2):
        works = [Work(callers) for _ in range(7)]
        until(lambda works=works: all(work.thread for work in works))
        assert len({work.thread for work in works}) == len(callers._threads) == 7
        for work in works:
            work.end()


def test_whoever_is_told_of_an_end_may_call_again_without_another_thread(callers):
    ended = threading.Event()

    def again(left, _):
        if left:
            callers.call(lambda _: None, lambda call: again(left - 1, call))
        else:
            ended.set()

    again(50, None)
    assert ended.wait(5)
    assert len(callers._threads) == 1


def test_what_is_raised_is_the_calls_and_ends_no_thread(callers):
    for error in (ValueError("x"), SystemExit(1), KeyboardInterrupt()):
        ended = threading.Event()

        def work(_, error=error):
            raise error

        call = callers.call(work, lambda _, ended=ended: ended.set())
        assert ended.wait(5)
        assert call.exception() is error
        assert error.__traceback__ is None
        assert not call.cancelled()
    assert len(callers._threads) == 1
    assert callers._threads[0].is_alive()


def test_threads_end_on_close():
    callers = Callers()
    works = [Work(callers) for _ in range(3)]
    for work in works:
        work.end()
    threads = list(callers._threads)
    callers.close(5)
    assert not any(thread.is_alive() for thread in threads)


def test_closing_does_not_wait_longer_than_it_may_and_lets_calls_end():
    callers = Callers()
    work = Work(callers)
    began = time.monotonic()
    callers.close(0.05)
    assert time.monotonic() - began < 2
    work.end()
    until(lambda: not work.thread.is_alive())


def test_without_another_thread_calls_wait_for_those_there_are(callers, monkeypatch):
    first = Work(callers)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        second = Work(callers)
        assert not second.has_ended.wait(0.02)
        assert second.thread is None
        first.end()
        second.end()
        assert second.thread is first.thread
    works = [Work(callers) for _ in range(2)]  # now there are threads again
    until(lambda: all(work.thread for work in works))
    for work in works:
        work.end()
    assert len(callers._threads) == 2


def test_without_any_thread_calling_is_an_error_and_leaves_nothing(callers, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(RuntimeError):
            Work(callers)
    Work(callers).end()
    assert len(callers._threads) == 1
