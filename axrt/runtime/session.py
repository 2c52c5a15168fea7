"""A session: one brain with its workers and its reader, which the loop runs."""

# The training has a session, each evaluation has one of its own, and a step that is dropped, for
# its data have ended, begins another: counters then start anew, and what is still on its way for
# the old one is dead by its generation. So nothing in a brain is ever taken back.

from dataclasses import dataclass, field
from typing import Protocol

from axrt.scheduler.lacks import Lack
from axrt.scheduler.rank_state import RankState
from axrt.workers.worker import Workers

from .reader import Read


class Reader(Protocol):
    """The contract of what reads microbatches for a replica."""

    def __call__(self, number: int) -> Read | None:
        """Read microbatch `number`. Returns messages with their payloads; None: it is not here
        yet."""
        ...

    @property
    def serves(self) -> bool:
        """Other replicas may want something of this reader."""
        ...

    def serve(self) -> Read:
        """Do what other replicas want of this reader. Returns messages with their payloads."""
        ...

    def lacks(self) -> list[Lack]:
        """What this reader waits for."""
        ...


@dataclass(slots=True)
class Session:
    """One brain with its workers: the training, or an evaluation."""

    # number that tells its parcels from those of other sessions; every rank counts alike
    generation: int
    state: RankState  # brain of this rank
    workers: Workers  # workers that run its tasks
    reader: Reader  # reader of the replica, which reads microbatches when they are wanted
    # rank of the job that holds a stage, by pipe and stage; None: this one. The loop fills it
    # as it sends.
    ranks: dict[tuple[int, int], int | None] = field(default_factory=dict)

    def waiting_for(self) -> list[Lack]:
        """What keeps this rank from going on, and which rank owes it."""
        return [*self.state.waiting_for(), *self.reader.lacks()]
