"""How fast steps come, over the last few of them; and how long the others will take."""

import time
from collections import deque
from collections.abc import Callable

_STEPS, _LEAST_S = 50, 5.0


class Rate:
    """Steps a second, over the last ones: as many as took five seconds, or a step at least.

    Args:
        now: clock, in seconds.
    """

    def __init__(self, done: int, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._marks = deque([(done, now())], _STEPS)
        self._last = 0.0

    def at(self, done: int) -> float:
        """Steps a second; 0 before the first one.

        Args:
            done: number of steps that are done now.
        """
        now = self._now()
        if done > self._marks[-1][0]:
            self._marks.append((done, now))
            while len(self._marks) > 2 and now - self._marks[1][1] >= _LEAST_S:
                self._marks.popleft()
            (first, since), (last, until) = self._marks[0], self._marks[-1]
            self._last = (last - first) / max(until - since, 1e-9)
        return self._last

    def skip(self) -> None:
        """Leave out the time since the last step: it was for something else."""
        if self._marks:
            done = self._marks[-1][0]
            self._marks.clear()
            self._marks.append((done, self._now()))


class TimeLeft:
    """How long a run will still take, by what its steps have taken since it began, or went on.

    All that happens between steps counts, since it will happen again. Times are the caller's: of a
    clock, or those of a file.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._first: tuple[int, float] | None = None

    def begin(self, done: int, at_s: float) -> None:
        """Note a start: what was before it says nothing of the steps to come.

        Args:
            at_s: time, in seconds.
        """
        self._first = done, at_s

    def at(self, done: int, at_s: float) -> float | None:
        """Seconds that are left; None before a step since the start. The first call is a start
        where there was none."""
        if self._first is None:
            self.begin(done, at_s)
        first, since = self._first or (done, at_s)
        if done <= first:
            return None
        return (at_s - since) / (done - first) * (self._steps - done)
