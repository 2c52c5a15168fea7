"""How fast steps come, over the last few of them."""

import time
from collections import deque
from collections.abc import Callable

_STEPS, _LEAST_S = 50, 5.0


class Rate:
    """Steps a second, over the last ones: as many as took five seconds, or a step at least.

    Args:
        done: number of steps that are done.
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
