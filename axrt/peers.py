"""Which ranks are still in the call that this rank is in: nobody waits for one that has gone.

A rank that has closed its engine, or speaks of another call, has sent all that it will ever send
for this one, and messages between two ranks keep their order. So what it still owes will not come:
the ranks have made
different calls. Two that wait for each other in different calls would say nothing at all; so a rank
that has waited for long tells
whom it waits for.
"""

import time
from collections.abc import Callable, Collection, Iterable

from axrt.errors import PeerLeftError
from axrt.heartbeat import Silence
from axrt.scheduler.state import Coordinates, Lack

# news that explain why a rank has gone, such as an END, come from another rank, and may come after
# it
_GRACE_S = 2.0
_ADVICE = "Every rank must make the same calls of the engine"


class Peers:
    """Who is there.

    Args:
        rank_of: the rank of the job that has a place.
        heartbeat: knows who is alive.
        now: a clock in seconds.
    """

    def __init__(
        self,
        rank_of: Callable[[Coordinates], int],
        heartbeat: Silence,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rank_of, self._heartbeat, self._now = rank_of, heartbeat, now
        self._left: set[int] = set()
        self._elsewhere: set[int] = set()
        self._waiting: set[int] = set()
        self._missed_since: float | None = None
        self._still_since: float | None = None

    def begin_call(self) -> None:
        """This rank is in another call now."""
        self._elsewhere.clear()
        self._waiting.clear()
        self._missed_since = None
        self.moved()

    def moved(self) -> None:
        """Something has happened here."""
        self._still_since = None
        self._heartbeat.moves()

    def has_left(self, rank: int) -> None:
        """It has closed its engine."""
        self._left.add(rank)

    def is_elsewhere(self, rank: int) -> None:
        """It has spoken of another call."""
        self._elsewhere.add(rank)

    def waits_for_me(self, rank: int) -> None:
        """It cannot go on in its call before this rank does something in the same."""
        self._waiting.add(rank)

    def still_there(self, ranks: Iterable[int]) -> set[int]:
        """Those that have not closed their engines."""
        return set(ranks) - self._left

    def to_be_told(self, lacks: Callable[[], Iterable[Lack]]) -> set[int]:
        """This rank can do nothing: whom to tell that it waits for them; once, when it has waited
        for long."""
        if self._still_since is None:
            self._still_since = self._now()
        if self._now() - self._still_since <= _GRACE_S:
            return set()
        self._still_since = float("inf")
        return self.owing(lacks)

    def owing(self, lacks: Callable[[], Iterable[Lack]]) -> set[int]:
        """The ranks that owe what is lacking."""
        return {self._rank_of(lack.owed_by) for lack in lacks() if lack.owed_by is not None}

    def check(self, lacks: Callable[[], Iterable[Lack]]) -> None:
        """This rank can do nothing, and nothing is on its way in.

        Args:
            lacks: what keeps it; asked for only when someone has gone.
        Raises:
            PeerLeftError: a rank that has gone owes something, and has for a while.
        """
        gone = self._left | self._elsewhere
        owed = (
            [
                (self._rank_of(lack.owed_by), str(lack))
                for lack in lacks()
                if lack.owed_by is not None
            ]
            if gone
            else []
        )
        self._miss([(rank, text) for rank, text in owed if rank in gone])

    def check_owing(self, ranks: Collection[int], what: str) -> None:
        """The same, for a rank that runs nothing and waits for something from ranks of the job."""
        gone = self._left | self._elsewhere | self._waiting
        self._miss(
            [(rank, f"waiting for {what} from rank {rank}") for rank in ranks if rank in gone]
        )

    def check_alive(self, owing: Callable[[], Iterable[int]]) -> None:
        """This rank can do nothing before these ranks have done something; what is on its way in
        may never come, either.

        Raises:
            PeerLostError: one of them shows no sign of life.
        """
        self._heartbeat.waits(owing)

    def _miss(self, missed: list[tuple[int, str]]) -> None:
        if not missed:
            self._missed_since = None
        elif self._missed_since is None:
            self._missed_since = self._now()
        elif self._now() - self._missed_since > _GRACE_S:
            rank, text = missed[0]
            if rank in self._left:
                what = "has closed its engine"
            else:
                what = (
                    "has gone on to another call"
                    if rank in self._elsewhere
                    else "waits for this rank in another call"
                )
            raise PeerLeftError(f"{text}, which {what}. {_ADVICE}")
