"""How many requests at once: fewer after trouble, more again after success."""

import time

from rayloader.storage.pacing import Load, Window


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


def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_a_process_is_busy_while_it_computes_and_idle_while_it_waits():
    load = Load()
    assert not load.busy
    began = time.perf_counter()
    burn(0.4)
    load.look(began + 0.45)
    assert load.busy
    load.look(began + 0.5)
    assert load.busy, "too soon to look again"
    load.look(began + 60)
    assert not load.busy


def test_after_a_failed_call_objects_are_asked_for_one_by_one_for_a_while():
    load = Load()
    began = time.perf_counter()
    load.failed(began)
    burn(0.4)
    load.look(began + 0.45)
    assert not load.busy
    burn(0.4)
    load.look(began + 5.1)
    assert not load.busy, "over all that time it was not busy"
    burn(0.4)
    load.look(began + 5.5)
    assert load.busy
