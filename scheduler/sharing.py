"""Replicas that share the microbatches of a step: whichever has room takes one (work stealing)."""

# The reader of each replica draws its own microbatches, as ever. A reader that has none left asks
# another replica's for one of its, so a slow replica computes fewer, and the number of a
# microbatch, with its data and its dropout, stays what it was.
#
# The brain of a replica knows nothing of this. It has *slots*, more than microbatches of its own,
# and numbers them as microbatches are numbered where each replica has its own. A slot that finds no
# microbatch is *empty*: its tasks run, do nothing, and tell every rank of the pipeline in the usual
# way that the step is over.

from dataclasses import dataclass, field, replace
from enum import Enum
from math import ceil

from .job import Job
from .policies import Fixed

# Slots for a microbatch of a replica's own: so many times as many as the others it may compute. An
# empty slot costs a message to and fro on each edge of the pipeline.
SLOTS = 1.5
# Microbatches that a replica never gives away: who asks ahead has room for the last one no sooner
# than its owner, and even replicas would take it from each other.
KEPT = 1


# Replicas that share have slots, some of which stay empty. A brain that learns during a step how
# many microbatches it has was thought of. Every counter would jump, and a last microbatch could be
# known as such only after its forward has left. An empty slot says the same by tasks that take
# microseconds, and no row knows of it.
def with_sharing(job: Job, in_tree: bool = False) -> Job:
    """The job of replicas that share the microbatches of each step.

    Args:
        job: schedule of a training, where each replica has its own microbatches.
        in_tree: True if sums are to have the same bits whoever computes what.
    Raises:
        ValueError: replicas cannot share under this schedule.
    """
    slots, why = job.ranks * ceil(SLOTS * job.microbatches / job.ranks), ""
    bounds = job.policy.bounds(job.placement, 0, slots)
    if job.replicas == 1:
        why = "there is one replica; expected 2 or more"
    elif isinstance(job.policy, Fixed):
        why = "an order of tasks is fixed beforehand; expected another policy"
    elif job.placement.pipes > 1:
        why = (
            f"{job.policy.name} runs two pipes, whose reader is a whole step ahead; expected a "
            "policy of one pipe, such as '1f1b'"
        )
    elif bounds.in_flight + KEPT >= job.microbatches:
        grows = job.policy.bounds(job.placement, 0, 2 * slots).in_flight > bounds.in_flight
        why = (
            f"under {job.policy.name} a rank may take all that it can get at once, however slow "
            f"it is: {bounds.in_flight} in flight with schedule.microbatches = {job.microbatches}; "
            + (
                "expected a policy whose bound does not grow with the step, such as '1f1b'"
                if grows
                else f"expected at least {bounds.in_flight + KEPT + 1}"
            )
        )
    elif in_tree and job.splits:
        why = (
            f"{job.policy.name} splits backwards, so microbatches add to a gradient at the same "
            "time; expected run.deterministic = false, or whole backwards, such as those of '1f1b'"
        )
    if why:
        raise ValueError(f"share: {why}")
    return replace(job, microbatches=slots, drawn=job.microbatches, in_tree=in_tree)


class Choice(Enum):
    """What a reader does for the next slot."""

    DRAW = "draw"  # a microbatch of its own
    TAKE = "take"  # one that another replica has given
    ASK = "ask"  # another replica for one
    WAIT = "wait"  # for the answer
    LEAVE_EMPTY = "leave empty"  # nobody has any left


@dataclass(slots=True)
class Hand:
    """What the reader of one replica knows in a step of who has microbatches left."""

    replica: int  # index of the replica
    own: int  # number of microbatches that each replica's reader draws in a step
    # number of microbatches that this replica has left, and that others have to give, at most
    left: dict[int, int] = field(default_factory=dict)
    asked: int | None = None  # replica that was asked and has not answered; None: none was
    # indices of microbatches over all replicas that others have given, and that have no slot
    # yet
    given: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, job: Job, replica: int) -> "Hand":
        """The hand of a replica at the beginning of a step."""
        left = dict.fromkeys(range(job.replicas), job.drawn - KEPT)
        return cls(replica, job.drawn, left | {replica: job.drawn})

    def choice(self) -> Choice:
        """What to do for the next slot."""
        if self.left[self.replica]:
            return Choice.DRAW
        if self.given:
            return Choice.TAKE
        if self.asked is not None:
            return Choice.WAIT
        return Choice.LEAVE_EMPTY if self.whom() is None else Choice.ASK

    def draw(self) -> int:
        """Note that this replica's reader draws its next microbatch. Returns the index of it over
        all replicas."""
        drawn = self.own - self.left[self.replica]
        self.left[self.replica] -= 1
        return self.replica * self.own + drawn

    @property
    def spare(self) -> int:
        """How many microbatches this replica has to give."""
        return max(self.left[self.replica] - KEPT, 0)

    def whom(self) -> int | None:
        """The replica to ask: the one with most to give, of several the next one; None: nobody has
        any."""
        replicas = len(self.left)
        others = [(self.replica + after) % replicas for after in range(1, replicas)]
        most = max(others, key=self.left.__getitem__)
        return most if self.left[most] else None

    def asks_ahead(self, is_last: bool) -> bool:
        """To ask for the next slot now, so that an answer is here when there is room."""
        return not is_last and self.choice() is Choice.ASK

    def ask(self) -> int:
        """Note that the replica with most to give is asked. Returns it."""
        self.asked = self.whom()
        assert self.asked is not None
        return self.asked

    def answered(self, index: int | None, left: int) -> None:
        """Take in the answer of the replica that was asked.

        Args:
            index: index over all replicas of the microbatch that it gives; None: it has none to
                give.
        """
        assert self.asked is not None
        self.left[self.asked], self.asked = left, None
        if index is not None:
            self.given.append(index)

    def take(self) -> int:
        """The index of the first microbatch that was given; it has a slot now."""
        return self.given.pop(0)


def microbatch_for_slot(hands: list[Hand], replica: int, is_last: bool) -> int | None:
    """The microbatch that a replica's next slot gets where answers take no time.

    Args:
        replica: index of the replica.
        is_last: the slot is the last one of the step.
    Returns:
        Its index over all replicas; None: the slot is empty.
    """
    hand = hands[replica]
    _ask_all(hands, hand)
    choice = hand.choice()
    if choice is Choice.LEAVE_EMPTY:
        return None
    index = hand.draw() if choice is Choice.DRAW else hand.take()
    if hand.asks_ahead(is_last):
        _ask_all(hands, hand)
    return index


def _ask_all(hands: list[Hand], hand: Hand) -> None:
    while hand.choice() is Choice.ASK:
        other = hands[hand.ask()]
        index = other.draw() if other.spare else None
        hand.answered(index, other.spare)
