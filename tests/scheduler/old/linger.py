"""Waiting a moment for what is due before a weight gradient starts that is early (`RankState.is_early`).

A message that is late by a hair's breadth would else find its receiver in a task that nobody waits for. The moment is a share of what that
task takes, and only where it comes in one piece: a piece of many is not long in the way. Making the moment shorter after one that was
in vain was tried: it loses more where some are than it saves where all are (docs/schedules.md).
"""

LINGER = 0.2


class Linger:
    """Of one rank; any unit of time.

    Args:
        share: the moment, as a share of what the weight gradient takes.
    """

    def __init__(self, share: float = LINGER) -> None:
        self._share = share
        self.until: float | None = None  # None where the rank does not wait

    def holds_back(self, now: float, takes: float) -> bool:
        """Something early could start now, and is not to; it takes so long."""
        if self.until is None:
            self.until = now + self._share * takes
        return now < self.until

    def end(self) -> None:
        """Something starts, or the rank is in another call."""
        self.until = None
