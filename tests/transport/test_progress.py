"""The thread that looks after large messages: it looks while it is wanted, and ends when told."""

import threading
import time

import pytest

from axrt.transport.progress import Progress


def until(fact: "threading.Event") -> None:
    assert fact.wait(10)


def test_it_looks_while_it_is_wanted() -> None:
    looked = threading.Event()
    progress = Progress(looked.set)
    progress.wanted(True)
    until(looked)
    progress.wanted(False)
    time.sleep(0.01)
    looked.clear()
    time.sleep(0.02)
    assert not looked.is_set()
    progress.wanted(True)
    until(looked)
    progress.stop()


def test_it_looks_now_and_then_at_what_needs_it_seldom() -> None:
    looked: list[float] = []
    progress = Progress(lambda: looked.append(time.monotonic()))
    progress.wanted(False, seldom=True)
    while len(looked) < 4:
        time.sleep(0.01)
    assert looked[-1] - looked[0] >= 3 * 0.02
    progress.wanted(False)
    time.sleep(0.05)
    looked.clear()
    time.sleep(0.1)
    assert not looked
    progress.stop()


def test_who_never_wanted_it_has_no_thread() -> None:
    before = threading.active_count()
    progress = Progress(lambda: pytest.fail("nobody wanted it"))
    progress.wanted(False)
    assert threading.active_count() == before
    progress.stop()


def test_it_ends_though_a_look_takes_the_wish_back_meanwhile() -> None:
    looking, told = threading.Event(), threading.Event()

    def look() -> None:
        looking.set()
        until(told)
        progress.wanted(False)

    progress = Progress(look)
    progress.wanted(True)
    until(looking)
    ender = threading.Thread(target=progress.stop, daemon=True)
    ender.start()
    time.sleep(0.02)  # it waits for the thread now
    told.set()
    ender.join(10)
    assert not ender.is_alive()
