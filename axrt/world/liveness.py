"""Whether the ranks that a rank waits for are alive."""

# A rank that waits asks the ranks that owe it something for a *sign*: the seconds since a rank that
# matters has last worked. A rank that works answers 0. A rank that does nothing, as in a deadlock,
# answers for how long. A rank that waits itself passes on the worst sign of the ranks that it waits
# for, so a sign is always about the rank at the end of the chain. A rank that is stopped does not
# answer, and its last sign grows old. Ranks that wait for each other in a circle pass on signs that
# no rank renews.
#
# Only time counts in which this rank itself could run: a job that was suspended as a whole goes on
# as if nothing had been.

from collections.abc import Iterable
from typing import NamedTuple


# That a rank waits lets nobody go on. Ranks tell those that they wait for, once in a wait. Formerly
# that counted as news, so two ranks that told each other so began to wait anew every two seconds,
# and never lost patience with a third one that was stopped.
class Sign(NamedTuple):
    """The state of a rank that is waited for."""

    silent_s: float  # seconds since rank `about` is last known to have worked
    # rank that the sign is about: the one that was asked, or the last in a chain of ranks that
    # wait
    about: int
    answered: bool = False  # True if the rank that was asked has answered since it is waited for


# Who answers a question about life answers first, and hears then. The other way round two ranks
# that waited for each other handed one sign to and fro, which never grew old.
class Liveness:
    """The signs that one rank has of the ranks it waits for.

    Args:
        patience_s: seconds without a sign of life after which a rank counts as lost.
    """

    def __init__(self, rank: int, patience_s: float) -> None:
        self._rank, self._patience_s = rank, patience_s
        self._idle_s = 0.0
        self._signs: dict[int, Sign] = {}

    def pass_time(self, seconds: float, waits_for: Iterable[int], has_worked: bool) -> None:
        """Let time pass: all signs grow older.

        Args:
            seconds: seconds since the last call.
            waits_for: ranks that owe this one what it cannot go on without; none while it runs.
            has_worked: True if this rank has worked since the last call.
        """
        self._signs = {rank: self._signs.get(rank, Sign(0.0, rank)) for rank in waits_for}
        self._signs = {
            rank: sign._replace(silent_s=sign.silent_s + seconds)
            for rank, sign in self._signs.items()
        }
        self._idle_s = 0.0 if has_worked or self._signs else self._idle_s + seconds

    def heard(self, rank: int, silent_s: float, about: int) -> None:
        """Take in the sign with which a rank has answered."""
        if rank in self._signs:
            self._signs[rank] = Sign(silent_s, about, answered=True)

    def sign(self) -> Sign:
        """The sign with which this rank answers when it is asked."""
        if not self._signs:
            return Sign(self._idle_s, self._rank)
        return max(self._signs.values())

    def lost(self) -> Sign | None:
        """The sign of a rank that has shown no life for too long; None where there is no such
        rank."""
        worst = max(self._signs.values(), default=None)
        return worst if worst and worst.silent_s > self._patience_s else None
