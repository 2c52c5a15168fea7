"""A policy is two questions about a head that has all its inputs: what first, and may it start
now."""

# Why no policy here can get stuck. Say that nothing runs, nothing is on its way, and some task is
# left.
#
# *Caps, one for each stage* (1f1b, eager-1f1b, axonn, gpipe, merak, varuna, zb-h1, zb-h2; chimera,
# whose two stages on a rank have caps of their own). Take the oldest microbatch n with an
# unfinished backward (or input gradient), and the deepest stage s that has started it.
#
# * s is not the last: stage s+1 has activation n, and its head is F(s+1).n, because n is the
#   oldest, and so everything before it is done there. It was refused; the policies that refuse by a
#   cap admit a forward whenever in flight < cap with cap >= 1, and in flight is 0 there. (A cap on
#   what is held is no hindrance either: with nothing in flight all that is held is weight
#   gradients, which are never refused.) Contradiction.
# * s is the last: its backward needs nothing else. Only gpipe refuses backwards, and only until the
#   forwards of that step are done here; they are refused by nothing, since in flight < m holds for
#   the microbatches of the oldest step, and their activations come from stages where the same
#   holds.
# * No stage has started n: the reader gives it, and F0.n is the first case with s+1 = 0.
#
# *Nested caps, several stages a rank* (dualpipe, dualpipe-v, v-half, the rule of evaluations). A
# flat cap a rank deadlocks there: forwards of a shallow stage fill it, and those of the deeper one,
# which alone would free it, find no room. With caps that strictly increase with the stage it does
# not: of all forwards that lack room take one of the deepest stage s. What its rank holds is in
# flight, since weight gradients are never refused, and the shallower stages there hold less than
# its cap, so a microbatch is in flight on s or a deeper stage of this rank. Follow it down its
# pipe: it has not come back, so somewhere deeper its forward lacks room. Contradiction. v-half's
# caps of single stages are at least 1 and change nothing in this.
#
# *An order under nested caps* (interleaved-zb). Of the oldest microbatch n with an unfinished
# backward some forward is undone, else its backwards would run; older groups are done. If some
# chunk but the last has undone forwards of n's group, take the first by (stage, microbatch): it has
# its activation and is its rank's next, and what is in flight there is of that group and of chunks
# up to its own, c: at most (c + 1) p - 1, less than its cap, p v - r - (v - 1 - c). Else take the
# forward at which n itself stops: its rank has at most (v - 1) p in flight, and the cap of the last
# chunk is p v - r.
#
# *An order* (interleaved-1f1b, zb-v, v-min, adaptive, fixed). All ranks follow one acyclic order of
# forwards and input gradients (of interleaved-1f1b: of forwards). The due task, the first of this
# rank's that has not started, is never refused for the sake of another; take of all due tasks the
# first in that order: what it needs comes before it, so it is done. A due forward lacks room only
# while weight gradients wait, which are never refused: the order itself needs so much, and no more
# than the cap leaves above that run ahead. An order that is given is acyclic if one simulation of
# it ends, since nothing but the order decides what waits for what. breadth-first refuses nothing.
#
# *Rows*. Forwards and backwards stand here for rows of the table (`rules`) whose `admitted` asks
# the policy. Every other row is admitted always, but for recomputations and releases, which have
# their own paragraphs, and its head runs when its needs are met. So a row is stuck only behind
# another row, and the needs between rows of one step are acyclic: forward, backward, sums of
# buckets, norms, vote, fetches, steps, stores. Only gates lead from a step to the next, and from a
# run to the run after the next one (`rules/replicas.py`). A feature that adds rows keeps the proof
# if its rows are always admitted and come between two of these.
#
# *Slots.* Fetches of offloaded state (`rules.offload`) are such rows, between a bucket being whole
# and its step, but one is refused while all slots are taken. `rules/offload.py` argues why a slot
# becomes free. Forwards, backwards, sums and votes of a step need no slot, so all of the above
# holds for them whatever the copies do.
#
# *Residencies.* Weights that are whole for a time, gathered or brought from scratch, keep back what
# reads them until its residency has begun. `rules/residencies.py` argues why each begins, and is
# released: residencies follow one order in which the schedule has run to its end. Copies of one
# bucket on several stages are not in that order, and keep no run back where they could get stuck
# (`Job.ties_may_wait_in_a_circle`).
#
# *Stashes.* Where the device has room for fewer than a rank holds, forwards wait for copies that
# end, and backwards for stashes that come back. `rules/stash.py` argues that neither keeps back
# what the above says of policies.
#
# *Teams.* Where members hold a stage together, each has counts of its own, and may choose otherwise
# than the others. A task has pieces there. The first is asked about as above, and counts what is
# held; every other one needs the slices of all members of the piece before, and asks nobody. Of a
# kind and stage one task is open at a time, in order.
#
# * What the above shows to be admitted on a rank is so on each member: it argues with what that
#   rank has started, and no member has started a newer forward of a stage before an older one. So
#   say that the oldest task is admitted everywhere, and has begun on all members. Take the first of
#   its pieces that some member has not run: all members have run the one before, so its slices are
#   here, and nobody refuses it.
# * Nested caps: of all forwards that lack room, on any member, take one of the deepest stage s, and
#   of these the oldest. Followed down its pipe, the microbatch in flight stops where some member
#   lacks room for it: on a deeper stage, or on s itself, where it is older. Contradiction.
# * An order: of the due tasks of all members take the first. No other member's due task comes
#   before it, so each has begun it, or is due to.
#
# *Recomputation* adds a task between a forward and its backward that no policy is asked about. It
# is refused only while others of its stage are recomputed and wait, and the first of those wants
# nothing but its gradient, as a backward does that follows its forward.

from abc import abstractmethod
from typing import Any, NamedTuple, Protocol

from ..message import Meaning
from ..placement import Placement
from ..stash_places import StashMove
from ..task import AnyKind, Task


class View(Protocol):
    """The counters of this rank that a policy may look at; no clock and no tensors."""

    @property
    def policy(self) -> "Policy":
        """The policy of the step: between two steps another one may come."""
        ...

    @property
    def placement(self) -> Placement: ...
    @property
    def rank(self) -> int:
        """Index of this rank in its pipeline."""
        ...

    @property
    def ranks(self) -> int:
        """Number of ranks of a pipeline."""
        ...

    @property
    def microbatches(self) -> int:
        """Number of microbatches of a step and replica."""
        ...

    @property
    def in_flight(self) -> int:
        """Number of forwards started here whose backward (or input gradient) has not started."""
        ...

    @property
    def held(self) -> int:
        """Number of forwards started here whose weight gradient has not started.

        It equals `in_flight` where backwards are whole.
        """
        ...

    @property
    def memo(self) -> dict[Any, Any]:
        """What policies have worked out from what has started here; empty after each start."""
        ...

    @property
    def reached(self) -> dict[Any, int]:
        """What policies keep of how far a plan has come; it is not emptied, so it may hold only
        what grows with what has started here."""
        ...

    def started(self, kind: AnyKind, stage: int) -> int:
        """Number of tasks of a kind that have started on a stage of this rank."""
        ...

    def started_whole(self, kind: AnyKind, stage: int) -> int:
        """Number of tasks of a kind of which all pieces have started on a stage of this rank."""
        ...

    def in_flight_of(self, stage: int) -> int:
        """Number of microbatches in flight on one stage of this rank."""
        ...

    def forwards_left(self, task: Task) -> bool:
        """Some forwards of the task's step have not started on the task's stage."""
        ...

    def has_room(self, move: StashMove, stage: int, is_near: bool = True) -> bool:
        """The device has room for the stash that work on a stage makes or brings back.

        What is brought back while its backward is not near finds less.
        """
        ...

    def has_stepped(self, stage: int, residency: int) -> bool:
        """The weights that a residency of a stage is for have been stepped."""
        ...

    def has_come(self, meaning: Meaning, stage: int, number: int) -> bool:
        """The stage has received that message for this microbatch and all before it."""
        ...


class Bounds(NamedTuple):
    """The most that a rank has under way, in microbatches of one stage each.

    Args:
        in_flight: largest number of microbatches with their forward started and their backward (or
            input gradient) not.
        held: largest number of microbatches with their forward started and their weight gradient
            not.
    """

    in_flight: int
    held: int


class Policy(Protocol):
    """The rule that says which ready head runs first (least key), and which must wait."""

    __slots__ = ()

    @property
    def name(self) -> str: ...
    @property
    def splits(self) -> bool:
        """Backwards are split into input gradients and weight gradients (zero bubble)."""
        ...

    @property
    def placements(self) -> tuple[str, ...]:
        """Names of the placements that the policy is made for, its own first."""
        ...

    @property
    def recomputes_ahead(self) -> int:
        """Largest number of microbatches of a stage that have been recomputed and whose backward
        has not started."""
        return 1

    @abstractmethod
    def key(self, task: Task, view: View) -> tuple[int, ...]:
        """The sort key of a head: of forwards and backwards the one with the least key runs first.

        Weight gradients come after them all, by their own keys.
        """
        ...

    # Policies may refuse backwards. gpipe was not gpipe while `admits` saw forwards only.
    @abstractmethod
    def admits(self, task: Task, view: View) -> bool:
        """The head of a kind has room to start now."""
        ...

    def is_early(self, task: Task, view: View) -> bool:
        """A weight gradient that may start had better wait: other work should arrive any moment.

        It is asked only where the rank has nothing better to do (anticipation, see `linger`).
        """
        return False

    def weights_in_turn(self, rank: int) -> bool:
        """On a rank each weight gradient may run before the next input gradient of its stage: the
        place of its stash may be the only one for the next (`offload_activations`)."""
        return True

    def weights_by_residency(self, rank: int) -> bool:
        """On a rank each weight gradient may run before any forward or input gradient of another
        stage: until it has, its gradient may have the only place for whole weights (`gathered`)."""
        return True

    @abstractmethod
    def bounds(self, placement: Placement, rank: int, microbatches: int) -> Bounds:
        """The most that a rank of the placement has under way under this policy.

        Args:
            placement: placement of the stages.
            rank: index of the rank in its pipeline.
            microbatches: number of microbatches of a step and replica.
        """
        ...
