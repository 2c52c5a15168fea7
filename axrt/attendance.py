"""Which ranks are still in the call that this rank is in: nobody waits for one that has gone.

A rank that has closed its engine, or speaks of another call, has sent all that it will ever send for this one, and messages
between two ranks keep their order. So what it still owes will not come: the ranks have made different calls.
"""

import time
from collections.abc import Callable, Iterable

from axrt.errors import PeerLeftError
from axrt.scheduler.state import Lack, Place

_GRACE_S = 2.0  # news that explain why a rank has gone, such as an END, come from another rank, and may come after it


class Attendance:
    """Who is there.

    Args:
        rank_of: the rank of the job that has a place.
        now: a clock in seconds.
    """

    def __init__(self, rank_of: Callable[[Place], int], now: Callable[[], float] = time.monotonic) -> None:
        self._rank_of, self._now = rank_of, now
        self._left: set[int] = set()
        self._elsewhere: set[int] = set()
        self._missed_since: float | None = None

    def begin_call(self) -> None:
        """This rank is in another call now."""
        self._elsewhere.clear()
        self._missed_since = None

    def has_left(self, rank: int) -> None:
        """It has closed its engine."""
        self._left.add(rank)

    def is_elsewhere(self, rank: int) -> None:
        """It has spoken of another call."""
        self._elsewhere.add(rank)

    def have_all_left(self, ranks: Iterable[int]) -> bool:
        return self._left.issuperset(ranks)

    def check(self, lacks: Callable[[], Iterable[Lack]]) -> None:
        """This rank can do nothing, and nothing is on its way in.

        Args:
            lacks: what keeps it; asked for only when someone has gone.
        Raises:
            PeerLeftError: a rank that has gone owes something, and has for a while.
        """
        gone = self._left | self._elsewhere
        missed = [lack for lack in lacks() if self._owing(lack) in gone] if gone else []
        if not missed:
            self._missed_since = None
        elif self._missed_since is None:
            self._missed_since = self._now()
        elif self._now() - self._missed_since > _GRACE_S:
            what = "has closed its engine" if self._owing(missed[0]) in self._left else "has gone on to another call"
            raise PeerLeftError(f"{missed[0]}, which {what}. Every rank must make the same calls of train_batch and eval_batch")

    def _owing(self, lack: Lack) -> int | None:
        return None if lack.owed_by is None else self._rank_of(lack.owed_by)
