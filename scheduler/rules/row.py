"""A row of the table of work: the needs of a kind of work, their senders, and what follows."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from ..bucket import Copies
from ..counters import Counter, Gate, Joints
from ..job import Job, StageCopy
from ..message import Meaning, Message
from ..policies.policy import View
from ..stash_places import StashMove
from ..task import AnyKind, Kind, Task


class Queue(Enum):
    """A vocabulary of queues: tasks of one queue run one after the other, tasks of two may
    overlap."""

    __hash__ = object.__hash__


class OnDevice(Queue):
    """The queues of a training and of an evaluation: the device's tasks; the collectives of a
    library that run beside them, and the tickets that are given out for those; copies between the
    device and the host or a disk, one queue a direction; steps on the host."""

    COMPUTE = "compute"
    COLLECTIVES = "collectives"
    TICKETS = "tickets"
    COPIES_IN = "copies in"
    COPIES_OUT = "copies out"
    HOST = "host"


class Need(NamedTuple):
    """A counter that must have passed the head of a kind before that head may run."""

    counter: Counter  # kind of task started, meaning of messages received, or gate
    # copies of stages that send the messages, () for tasks and gates. Where a meaning counts steps,
    # reductions or residencies, each sender sends one message for each, and they are numbered in
    # this order.
    senders: tuple[StageCopy, ...] = ()
    # index of the bucket whose counters have it; None: the stage's
    bucket: int | None = None
    # kind of work here that the messages answer, so that no message comes before it; None where
    # there is no such work
    after: AnyKind | None = None


class Sending(NamedTuple):
    """The message that follows from every task of a row: it has the number of the task."""

    meaning: Meaning  # what became true
    # stage, pipe: the stage that it is addressed to
    stage: int
    pipe: int


class Opening(NamedTuple):
    """A gate that work opens."""

    gate: Gate  # gate of the stage; it opens once every row of the stage that opens it has started
    # function that says how far it is open when all of them have started so many times
    to: Callable[[int], int]


class Pool(Enum):
    """What a rank has a few of, for work to take and to give back."""

    SLOTS = "slot"  # memory on the device for offloaded state of a bucket
    ON_HOST = "slot on the host"  # for the gradient of a bucket that steps there
    WHOLE = "place for whole weights"  # of a stage

    __hash__ = object.__hash__


Priority = Callable[[Task, View], tuple[int, ...]]
Leave = Callable[[Task, View], bool]


def nothing(task: Task) -> Iterable[Message]:
    """No message follows."""
    return ()


def always(task: Task, view: View) -> bool:
    """The head is always admitted."""
    return True


def never(task: Task, view: View) -> bool:
    """The task is never early."""
    return False


def for_steps(job: Job, *gates: Gate) -> tuple[Opening, ...]:
    """Gates that are open for the microbatches of the next step once the work of a step is done."""
    return tuple(Opening(gate, lambda steps: job.first_of(steps + 1)) for gate in gates)


def at_once(task: Task, view: View) -> tuple[int, ...]:
    """The priority of work that comes before all other, in the order of stages and buckets."""
    return (0, 0, task.stage, task.part)


def urgent(level: int) -> Priority:
    """The priority of work that ends a step, or brings weights: before all that the policy orders,
    the least level first, then by stage and bucket."""
    return lambda task, view: (0, level, task.stage, task.part)


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of work on a stage, or on a bucket of it."""

    kind: AnyKind  # kind of work
    needs: tuple[Need, ...]  # counters, each of which must have passed the head before it may run
    # function that gives the sort key of a head; None where there is a level instead. Of all
    # heads of a queue that may run, the one with the least key does. Keys begin with 0 for work
    # that ends a step, 1 for work that the policy orders, and more for work that fills time.
    priority: Priority | None = None
    # function that gives the messages that follow from a task, besides that of `sends`. Of work
    # that counts microbatches it is asked for the last one of a step alone. A task in pieces
    # sends them with its last piece.
    then: Callable[[Task], Iterable[Message]] = nothing
    # function that gives the messages that follow where a task, or a piece of it, completes the
    # gradient of a bucket; None where the work completes none
    completes: Callable[[Task, int], Iterable[Message]] | None = None
    bucket: int | None = None  # index of the bucket that the work is done on; None: the stage
    queue: Queue = OnDevice.COMPUTE  # queue on which the work runs
    # what the key begins with where the policy gives the rest of it, and is asked whether the
    # head may run, besides `admitted`. 0: the policy is not asked, and `priority` is.
    level: int = 0
    sends: Sending | None = None  # message that follows from every task; None: none does
    admitted: Leave = always  # function that says whether the head has room to run now
    # function that says whether other work comes first by the policy's plan, though the head
    # may run; that work should be here any moment
    early: Leave = never
    fills: bool = False  # True if the work fills time and no other rank waits for it
    opens: tuple[Opening, ...] = ()  # gates that the work opens
    # True if the messages that follow give out the group's next ticket, which is then their
    # number
    gives_tickets: bool = False
    by_ticket: bool = False  # True if the work runs on the bucket's ticket
    in_order: bool = False  # True if such work of a rank starts in the order of `Job.residencies`
    # pool of which the work starts only with one that is free, which it takes; None: it takes
    # none
    takes: Pool | None = None
    # pool of which one is free again when the work has ended; None: it frees none
    frees: Pool | None = None
    in_flight: int = 0  # change of the rank's microbatches in flight when a task starts: -1, 0 or 1
    # change of the rank's microbatches that hold memory when a task starts: -1, 0 or 1
    held: int = 0
    # joints of the work, where a team holds the stage and exchanges slices in it; None: none.
    # Its first piece asks the policy and takes its memory, or frees it; the others ask nobody.
    joints: Joints | None = None
    # what the work does with the stash of its microbatch, where that may leave the device;
    # None: nothing
    stash: StashMove | None = None


@dataclass(frozen=True, slots=True)
class StageHere:
    """A stage on this rank, as the rules see it."""

    job: Job  # schedule of the run
    stage_copy: StageCopy  # the stage, and the pipe whose copy of it this rank holds
    # all copies of each bucket of the stage, this one included; () in an evaluation
    buckets: tuple[Copies, ...] = ()

    @property
    def is_first(self) -> bool:
        return self.stage_copy.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage_copy.stage == self.job.last_stage

    @property
    def recomputes(self) -> bool:
        """Some layers of the stage run forward again before a backward."""
        return self.job.trains and self.stage_copy.stage in self.job.recomputed

    @property
    def offloads_stash(self) -> bool:
        """What microbatches keep for their backwards may leave the device."""
        pipe, stage = self.stage_copy
        placement = self.job.placement
        whole = pipe // self.job.team
        return self.job.offloads_stash(placement.rank_of(stage, whole % placement.pipes))

    @property
    def back(self) -> Kind:
        """The kind that sends a gradient back: the input gradient or the whole backward."""
        return Kind.INPUT if self.job.splits else Kind.BACKWARD

    @property
    def completes(self) -> Kind:
        """The kind that completes a microbatch's gradient of the weights: the weight gradient or
        the whole backward."""
        return Kind.WEIGHT if self.job.splits else Kind.BACKWARD
