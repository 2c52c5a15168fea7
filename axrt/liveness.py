"""Whether the ranks that a rank waits for are alive.

A rank that waits asks those that owe it something for a *sign*: how long ago somebody who matters
has last worked. Who works says 0. Who does nothing, in a deadlock say, says for how long. Who waits
itself passes on the worst sign that it has of those it waits for, so the sign is always about the
rank at the end of the chain. Who is stopped says nothing, and its last sign grows old. Ranks that
wait for each other in a circle pass on signs that nobody renews.

Time is what this rank has lived through: a job that was suspended as a whole goes on as if nothing
had been.
"""

from collections.abc import Iterable
from typing import NamedTuple


class Sign(NamedTuple):
    """What is known of a rank that is waited for.

    Args:
        silent_s: seconds since the rank that this is about has last been known to work.
        about: that rank; the one that was asked, or the last in a chain of ranks that wait.
        answered: it has answered since it is waited for.
    """

    silent_s: float
    about: int
    answered: bool = False


class Liveness:
    """The signs that one rank has.

    Args:
        rank: this one.
        patience_s: so long a rank may show no sign of life.
    """

    def __init__(self, rank: int, patience_s: float) -> None:
        self._rank, self._patience_s = rank, patience_s
        self._idle_s = 0.0
        self._signs: dict[int, Sign] = {}

    def pass_time(self, seconds: float, waits_for: Iterable[int], has_worked: bool) -> None:
        """So much time has passed here.

        Args:
            seconds: since the last call.
            waits_for: the ranks that owe this one what it cannot go on without; none while it runs.
            has_worked: it has, since the last call.
        """
        self._signs = {rank: self._signs.get(rank, Sign(0.0, rank)) for rank in waits_for}
        self._signs = {
            rank: sign._replace(silent_s=sign.silent_s + seconds)
            for rank, sign in self._signs.items()
        }
        self._idle_s = 0.0 if has_worked or self._signs else self._idle_s + seconds

    def heard(self, rank: int, silent_s: float, about: int) -> None:
        """A rank has answered with its sign."""
        if rank in self._signs:
            self._signs[rank] = Sign(silent_s, about, answered=True)

    def sign(self) -> Sign:
        """What this rank answers when it is asked."""
        if not self._signs:
            return Sign(self._idle_s, self._rank)
        return max(self._signs.values())

    def lost(self) -> Sign | None:
        """The sign of a rank that has shown none for too long, None where there is no such rank."""
        worst = max(self._signs.values(), default=None)
        return worst if worst and worst.silent_s > self._patience_s else None
