"""When tasks have ended, in seconds of the host's clock."""

# The host sees the end of a task on a device when it looks. Mostly it looks late, since it is
# launching other tasks. The device has timed events: they say how much time lies between the ends
# of two tasks, and nobody waits for them.
#
# When a task has ended is for the device to say. The host sees an end when it looks, mostly late,
# since it is launching the next task: forwards seemed to take what backwards took. So the streams
# of tasks and copies have timed events, which torch has for CUDA, ROCm and XPU. The clock
# counts on from one end to the next, and is set by the host's clock. `Compute` gives observers both
# times of a task. Where there is no such event, on a CPU, a thread or in a library's sums, a task
# ends when the host looks.

import time
from collections.abc import Callable
from typing import Protocol

from .queues import Moment, StreamEvent

_MOMENTS = 64  # after which the device's clock is set
_PAUSE_S = 1.0  # between two tasks, in which the clocks may part too far


class Clock(Protocol):
    """The contract of a clock for the ends of tasks on one queue."""

    def time_of(self, moment: Moment, began_s: float) -> float:
        """When a moment has passed, in seconds of `time.perf_counter`. It is asked when the moment
        is seen to have passed, in the order of the queue.
        """
        ...


class HostClock:
    """Takes the time at which the host looks: for queues whose ends have no events."""

    def time_of(self, moment: Moment, began_s: float) -> float:
        return time.perf_counter()


class DeviceClock:
    """Counts on from one moment of a stream to the next by the device's clock.

    The device's clock has another zero than the host's and goes a little faster or slower, so it is
    set by the host's. No moment is later than it is seen. Every 64 moments it is supposed that one
    of them was seen as soon as it had passed. And after a pause it begins anew, with the time at
    which the first moment is seen.

    Args:
        now: the host's clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._last: StreamEvent | None = None
        self._last_s = 0.0
        self._late: list[float] = []  # how long after each moment it was seen, in seconds

    def time_of(self, moment: Moment, began_s: float) -> float:
        assert isinstance(moment, StreamEvent)
        seen_s = ended_s = self._now()
        if self._last is None or began_s - self._last_s > _PAUSE_S:
            self._late.clear()
        else:
            by_device_s = self._last_s + moment.seconds_after(self._last)
            ended_s = max(began_s, min(seen_s, by_device_s))
        self._late.append(seen_s - ended_s)
        if len(self._late) == _MOMENTS:
            ended_s += min(self._late)
            self._late.clear()
        self._last, self._last_s = moment, ended_s
        return ended_s
