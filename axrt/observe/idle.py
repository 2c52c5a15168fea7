"""Why a rank does nothing, as a share of its time, while it trains."""

import time
from collections import defaultdict
from collections.abc import Callable

from .observer import Observer, Wait


class Idle(Observer):
    """Adds up the pauses of one rank by their cause.

    Args:
        now: clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._pause: tuple[str, float] | None = None
        self._lost: dict[str, float] = defaultdict(float)
        self._since = now()

    def waiting(self, wait: Wait) -> None:
        if self._pause is None:
            self._pause = wait.why(), self._now()

    def resumed(self) -> None:
        self._end_pause()

    def shares(self) -> dict[str, float]:
        """The share of the time since the call before, by cause (`scheduler.lacks.CAUSES`); causes
        without any are left away."""
        self._end_pause()
        now = self._now()
        took, self._since = max(now - self._since, 1e-9), now
        shares = {cause: seconds / took for cause, seconds in sorted(self._lost.items())}
        self._lost.clear()
        return shares

    def _end_pause(self) -> None:
        if self._pause is not None:
            (cause, since), self._pause = self._pause, None
            self._lost[cause] += self._now() - since
