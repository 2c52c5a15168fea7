"""When tasks have begun and ended, by clocks of the test's own."""

from itertools import pairwise
from random import Random
from statistics import median

import pytest

from axrt.device.device_clock import DeviceClock
from axrt.device.queues import Inline, Moment, StreamEvent
from axrt.runtime.compute import Compute
from axrt.scheduler.task import Kind, Task


class Ends:
    """A clock by which moments have passed at given seconds."""

    def __init__(self, *seconds: float) -> None:
        self._seconds = iter(seconds)

    def time_of(self, moment: Moment, began_s: float) -> float:
        return next(self._seconds)


def test_what_starts_behind_a_task_takes_time_from_the_end_of_that() -> None:
    starts = iter([1.0, 1.5, 7.0])
    clock = Ends(2.0, 5.0, 7.5)
    compute = Compute(Inline(), depth=3, naps=False, clock=clock, now=lambda: next(starts))
    tasks = [Task(Kind.FORWARD, 0, number) for number in range(3)]
    for task in tasks:
        compute.start(task, lambda: None)
    assert compute.finished() == [
        (tasks[0], 1.0, 2.0),
        (tasks[1], 2.0, 5.0),
        (tasks[2], 7.0, 7.5),
    ]


class Reached(StreamEvent):
    """A moment of a device whose clock has a zero of its own.

    Args:
        at_s: when it has passed, by that clock.
    """

    def __init__(self, at_s: float) -> None:
        self.at_s = at_s

    def seconds_after(self, other: StreamEvent) -> float:
        assert isinstance(other, Reached)
        return self.at_s - other.at_s


@pytest.mark.parametrize("rate", [1.0, 1 + 1e-4, 1 - 1e-4])
def test_the_clock_of_a_device_is_right_though_the_host_looks_late(rate: float) -> None:
    """It goes wrong by a tenth of a millisecond in a second, which is more than quartz does."""
    now_s, draws = [0.0], Random(1)
    clock = DeviceClock(now=lambda: now_s[0])
    end_s, off_s = 0.0, []
    for number in range(5000):
        began_s = end_s + 600 * (number == 2000)  # nothing is trained for ten minutes
        end_s = began_s + 0.01 + draws.random() / 100
        now_s[0] = end_s + draws.choice([0.0, 0.001, 0.004, 0.009])
        found_s = clock.time_of(Reached(77 + rate * end_s), began_s)
        assert found_s <= now_s[0], "it was seen before"
        assert found_s >= began_s
        off_s.append(found_s - end_s)
    assert max(map(abs, off_s[100:2000])) < 5e-4, "and a look is 3.5 ms late on average"
    assert max(map(abs, off_s[2000:])) < 1e-2, "as late as the first look after the pause"
    assert max(map(abs, off_s[2100:])) < 5e-4
    took_off = [abs(one - other) for one, other in pairwise(off_s)]  # in what a task takes
    assert median(took_off) < 1e-5


def test_no_task_ends_before_it_begins_or_after_it_is_seen() -> None:
    looks = iter([10.5, 10.55])
    clock = DeviceClock(now=lambda: next(looks))
    clock.time_of(Reached(10.0), began_s=9.9)  # it was seen half a second late
    assert clock.time_of(Reached(10.15), began_s=10.5) == 10.55
    looks = iter([10.0, 11.0, 11.0])
    clock = DeviceClock(now=lambda: next(looks))
    clock.time_of(Reached(20.0), began_s=9.9)
    assert clock.time_of(Reached(20.2), began_s=10.5) == 10.5
    assert clock.time_of(Reached(20.4), began_s=10.5) == pytest.approx(10.7)
