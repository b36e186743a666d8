"""How many requests at once: fewer after trouble, more again after success."""

import pytest

from rayloader.storage.pacing import Bundling, Window


def grown(window, answers):
    for _ in range(answers):
        window.success()
    return window.limit


def test_all_that_is_allowed_is_sent_while_all_goes_well():
    window = Window(64)
    assert grown(window, 1000) == 64


def test_trouble_halves_and_the_same_trouble_halves_once():
    window = Window(64)
    window.trouble(10.0)
    window.trouble(10.1)
    assert window.limit == 32
    window.trouble(10.6)
    assert window.limit == 16


def test_never_less_than_one():
    window = Window(8)
    for moment in range(20):
        window.trouble(float(moment))
    assert window.limit == 1
    assert grown(window, 1) >= 1


def test_it_grows_back_by_one_per_window():
    window = Window(64)
    window.trouble(1.0)
    assert grown(window, 32) in (32, 33)
    assert 33 <= grown(window, 40) <= 35
    assert grown(window, 5000) == 64


def test_a_new_ceiling_holds_at_once():
    window = Window(64)
    window.set_ceiling(3)
    assert window.limit == 3
    window.set_ceiling(100)
    assert window.limit == 100


def test_a_new_ceiling_does_not_forget_the_trouble():
    window = Window(64)
    window.trouble(1.0)
    window.set_ceiling(128)
    assert window.limit == 32
    window.set_ceiling(16)
    assert window.limit == 16


class Storage:
    """Reads at one rate one by one, and at another several per call."""

    def __init__(self, single, several):
        self.bundling = Bundling()
        self.rates = {False: single, True: several}
        self.now, self.reads = 100.0, 0

    def run(self, seconds, saturated=True):
        """The share of the time in which several were asked for per call."""
        several = 0
        for _ in range(round(10 * seconds)):
            self.now += 0.1
            on = self.bundling.per_call(64) > 1
            self.reads += int(self.rates[on] * 0.1)
            several += on
            self.bundling.look(self.now, self.reads, saturated)
        return several / (10 * seconds)


def test_several_per_call_are_asked_for_where_that_is_faster():
    storage = Storage(1500, 2500)
    assert storage.run(0.9) == 1, "from the beginning"
    assert storage.run(100) > 0.9


def test_several_per_call_are_asked_for_where_that_is_as_fast():
    storage = Storage(1000, 1000)
    storage.run(2)
    assert storage.run(100) > 0.9


def test_one_by_one_where_the_slowest_of_several_would_be_waited_for():
    storage = Storage(1600, 700)
    storage.run(6)
    assert storage.run(200) < 0.05


def test_one_trial_that_went_badly_changes_nothing():
    storage = Storage(1500, 1400)
    storage.run(2)
    storage.rates[False] = 1800
    while storage.bundling.per_call(64) > 1:
        storage.run(0.1)
    storage.run(0.6)
    assert storage.bundling.per_call(64) > 1
    storage.rates[False] = 1500
    assert storage.run(100) > 0.9


@pytest.mark.parametrize(
    ("window", "several"), [(1, 1), (8, 1), (16, 2), (32, 4), (64, 8), (1000, 8)]
)
def test_a_call_that_ends_leaves_most_of_the_window_full(window, several):
    assert Bundling().per_call(window) == several


def test_a_storage_that_changes_is_found_out():
    storage = Storage(1600, 700)
    storage.run(100)
    storage.rates = {False: 1600, True: 3000}
    storage.run(40)
    assert storage.run(60) > 0.8


def test_nothing_is_tried_while_there_is_too_little_to_do():
    storage = Storage(2500, 1500)
    assert storage.run(100, saturated=False) == 1


def test_after_a_failed_call_objects_are_asked_for_one_by_one_for_a_while():
    storage = Storage(1500, 2500)
    storage.run(3)
    storage.bundling.failed(storage.now)
    assert storage.run(5) == 0
    storage.run(2)
    assert storage.run(50) > 0.9


def test_calls_that_fail_together_are_one_trouble():
    storage = Storage(1500, 2500)
    for _ in range(8):
        storage.bundling.failed(storage.now)
        storage.now += 0.1
    assert storage.run(4) == 0
    assert storage.run(2) > 0.3


def test_calls_that_fail_again_and_again_are_tried_ever_more_seldom():
    storage = Storage(1500, 2500)
    alone = []
    for _ in range(4):
        storage.bundling.failed(storage.now)
        seconds = 0
        while storage.bundling.per_call(64) == 1:
            storage.run(0.1)
            seconds += 0.1
        alone.append(seconds)
    assert [round(seconds / 5) for seconds in alone] == [1, 2, 4, 8]
    storage.run(10)
    storage.bundling.failed(storage.now)
    assert storage.run(5) == 0
    assert storage.run(3) > 0.5, "they had proved well in between"
