"""When tasks have ended, in seconds of the host's clock.

The host sees the end of a task on a device when it looks. Mostly it looks late, since it is
launching the tasks behind. The device's own clock says how long after the end of the task before
that was, and never waits.
"""

import time
from collections.abc import Callable
from typing import Protocol

from axrt.queues import Moment, StreamEvent

_LOOKS = 64  # one of so many is as good as at once


class Clock(Protocol):
    """The contract of a clock for the ends of tasks on one queue."""

    def time_of(self, moment: Moment) -> float:
        """When a moment has passed, in seconds of `time.perf_counter`. It is asked for each moment
        once, in the order of the queue, when that is seen to have passed."""
        ...


class HostClock:
    """A moment has passed when the host sees it: for queues whose work runs on the host."""

    def time_of(self, moment: Moment) -> float:
        return time.perf_counter()


class DeviceClock:
    """Counts on from one moment of a stream to the next by the device's clock.

    The device's clock has another zero than the host's and goes a little faster or slower. So no
    moment is later than it is seen, and of every 64 one at least was seen as soon as it had passed.

    Args:
        now: the host's clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._last: StreamEvent | None = None
        self._last_s = 0.0
        self._late: list[float] = []  # how long after each moment it was seen, in seconds

    def time_of(self, moment: Moment) -> float:
        assert isinstance(moment, StreamEvent)
        seen_s = at_s = self._now()
        if self._last is not None:
            at_s = min(seen_s, self._last_s + moment.seconds_after(self._last))
        self._late.append(seen_s - at_s)
        if len(self._late) == _LOOKS:
            at_s += min(self._late)
            self._late.clear()
        self._last, self._last_s = moment, at_s
        return at_s
