"""Which ranks are still in the call that this rank is in: nobody waits for a rank that has gone."""

# A rank that has closed its engine, or speaks of another call, has sent all that it will ever send
# for this one, and messages between two ranks keep their order. So what it still owes will not
# come: the ranks have made different calls. Two ranks that wait for each other in different calls
# would say nothing at all. So a rank that has waited for long tells the ranks that it waits for.

import time
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from axrt.errors import PeerLeftError
from axrt.scheduler.lacks import Coordinates, Lack
from axrt.world.heartbeat import Silence

# news that explain why a rank has gone, such as an END, come from another rank, and may come after
# it
_GRACE_S = 2.0
_ADVICE = "Every rank must make the same calls of the engine"


class Place(NamedTuple):
    """Where a rank is among the sessions of its engine."""

    # number of sessions that it has entered, this one included. A training that goes on after
    # an evaluation is entered anew, so generations alone do not tell who is ahead.
    entered: int
    generation: int  # generation of the session

    def is_left_by(self, other: "Place") -> bool:
        """A rank that waits at `other` will do nothing more here: it is ahead, or its session of
        the same number is another one. One that is behind is waiting for what is on its way."""
        ahead = other.entered > self.entered
        return ahead or (other.entered == self.entered and other.generation != self.generation)


# Who is in another call is told by sessions that were entered. Generations alone were tried: a
# training goes on under its old one after an evaluation, so healthy ranks accused each other.
class Peers:
    """The other ranks, as far as this one knows where they are.

    Args:
        rank_of: function that maps coordinates to a rank of the job.
        now: clock, in seconds.
    """

    def __init__(
        self,
        rank_of: Callable[[Coordinates], int],
        heartbeat: Silence,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rank_of, self._heartbeat, self._now = rank_of, heartbeat, now
        self._left: dict[int, int] = {}  # number of calls, by rank
        self._elsewhere: set[int] = set()
        self._place = Place(0, 0)
        self._waits_in: dict[int, Place] = {}
        self._missed_since: float | None = None
        self._still_since: float | None = None

    @property
    def place(self) -> "Place":
        """The session that this rank is in, or was in last."""
        return self._place

    def begin_session(self, generation: int) -> None:
        """Note that this rank has entered a session."""
        self._place = Place(self._place.entered + 1, generation)
        self.begin_call()

    def begin_call(self) -> None:
        """Note that this rank is in another call now."""
        self._elsewhere.clear()
        self._missed_since = None
        self.moved()

    def moved(self) -> None:
        """Note that something has happened here."""
        self._still_since = None
        self._heartbeat.moves()

    def has_left(self, rank: int, calls: int = 0) -> None:
        """Note that a rank has closed its engine, after so many calls of it."""
        self._left[rank] = calls

    def check_calls(self, calls: int) -> None:
        """Check that all ranks that have left have made as many calls as this one.

        Raises:
            PeerLeftError: one has not.
        """
        for rank, its in sorted(self._left.items()):
            if its != calls:
                raise PeerLeftError(
                    f"rank {rank} has made {its} calls of its engine, and this rank {calls}. "
                    f"{_ADVICE}"
                )

    def is_elsewhere(self, rank: int) -> None:
        """Note that a rank has spoken of another call."""
        self._elsewhere.add(rank)

    def waits_for_me(self, rank: int, place: "Place") -> None:
        """Note that a rank cannot go on in its session before this rank does something in the same
        one."""
        self._waits_in[rank] = place

    def still_there(self, ranks: Iterable[int]) -> set[int]:
        """Those of the ranks that have not closed their engines."""
        return set(ranks) - self._left.keys()

    def to_be_told(self, lacks: Callable[[], Iterable[Lack]]) -> set[int]:
        """The ranks to tell that this one waits for them: once, when it has waited for 2 seconds,
        else none.

        Args:
            lacks: function that gives what keeps this rank from going on.
        """
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
        """Check that no rank has gone that this one waits for, when this one can do nothing and
        nothing is on its way in.

        Args:
            lacks: function that gives what keeps this rank; called only when some rank has gone.
        Raises:
            PeerLeftError: a rank that has gone owes something, and has for 2 seconds.
        """
        gone = self._gone()
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
        """The check for a rank that runs no tasks and waits for control messages.

        Raises:
            PeerLeftError: one of them has gone, or waits for this rank in another call, and has for
                2 seconds.
        """
        gone = self._gone()
        self._miss(
            [(rank, f"waiting for {what} from rank {rank}") for rank in ranks if rank in gone]
        )

    def check_alive(self, owing: Callable[[], Iterable[int]]) -> None:
        """Check that the ranks that this one waits for are alive; parcels on their way in may never
        come, either.

        Args:
            owing: function that gives these ranks.
        Raises:
            PeerLostError: one of them shows no sign of life.
        """
        self._heartbeat.waits(owing)

    def _gone(self) -> set[int]:
        """The ranks that are not in the call of this one, as far as is known."""
        waiting = {rank for rank, place in self._waits_in.items() if self._place.is_left_by(place)}
        return self._left.keys() | self._elsewhere | waiting

    def _miss(self, missed: list[tuple[int, str]]) -> None:
        if not missed:
            self._missed_since = None
        elif self._missed_since is None:
            self._missed_since = self._now()
        elif self._now() - self._missed_since > _GRACE_S:
            rank, text = missed[0]
            if rank in self._left:
                what = "has closed its engine"
            elif rank in self._elsewhere:
                what = "has gone on to another call"
            else:
                what = "waits for this rank in another call"
            raise PeerLeftError(f"{text}, which {what}. {_ADVICE}")
