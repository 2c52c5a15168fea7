"""Waiting a moment for what is due before something early starts; see `RankState.is_early`."""

import time
from collections.abc import Callable

from axrt.scheduler.state import LINGER


class Linger:
    """The moment that a rank waits: a share of what the weight gradient, which would be in the way, takes on its stage.

    Args:
        now: a clock in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._took_s: dict[int, float] = {}
        self._until_s: float | None = None

    def took(self, stage: int, seconds: float) -> None:
        """A piece of a weight gradient has run; one that was held up counts no more than twice the one before."""
        self._took_s[stage] = min(seconds, 2 * self._took_s.get(stage, seconds))

    def begin(self, stage: int) -> None:
        """What is early on this stage could start now; nothing changes where the rank waits already."""
        if self._until_s is None:
            self._until_s = self._now() + LINGER * self._took_s.get(stage, 0.0)

    @property
    def left_s(self) -> float | None:
        """How long the rank still waits; None where it does not."""
        return None if self._until_s is None else max(self._until_s - self._now(), 0.0)

    def end(self) -> None:
        """Something has started, or another session."""
        self._until_s = None
