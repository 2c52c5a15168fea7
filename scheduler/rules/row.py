"""A row of the table of work: what a kind of work needs, who owes it, and what follows from it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from ..bucket import Copies
from ..job import Job, Seat
from ..lane import Counter, Gate
from ..message import Message
from ..policies.policy import View
from ..task import AnyKind, Kind, Task


class Queue(Enum):
    """A vocabulary of queues: tasks of one run one after the other, those of two may overlap."""

    __hash__ = object.__hash__


class OnDevice(Queue):
    """Where the work of a training runs."""

    COMPUTE = "compute"


class Need(NamedTuple):
    """A counter that must have passed the head of a kind.

    Args:
        counter: of tasks started, messages received, or a gate.
        senders: of messages, who sends them. Where one counts steps, each sender sends one a step,
            and they are numbered in this order.
        bucket: whose counter it is; None: the stage's.
        after: of messages, the kind of work here that they answer: none comes before it.
    """

    counter: Counter
    senders: tuple[Seat, ...] = ()
    bucket: int | None = None
    after: AnyKind | None = None


Turn = Callable[[Task, View], tuple[int, ...]]
Leave = Callable[[Task, View], bool]


def nothing(task: Task) -> Iterable[Message]:
    """No message follows."""
    return ()


def always(task: Task, view: View) -> bool:
    """Never refused."""
    return True


def never(task: Task, view: View) -> bool:
    return False


def numbered(step: int, senders: Sequence[object], sender: object) -> int:
    """The number of what a sender says in a step, of those that count steps."""
    return step * len(senders) + senders.index(sender)


def urgent(level: int) -> Turn:
    """Before everything that waits for the policy's word; the least level first, then by stage and
    bucket."""
    return lambda task, view: (0, level, task.stage, task.part)


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of work on a stage, or on a bucket of it.

    Args:
        kind: of the work.
        needs: its head may run when each of these counters has passed it.
        then: the messages that follow from a task, of one in pieces from its last.
        completes: the messages that follow where a task, or a piece of it, completes the gradient
            of a bucket.
        bucket: that the work is done on; None: the stage.
        queue: where it runs.
        turn: of all heads of a queue that may run the one with the least turn does. Turns begin
            with 0 for what ends a step, 1 for what the policy orders, and more for what fills time.
        admitted: the head may run now, as far as room goes.
        early: the head may run, but by the policy's plan other things come before it, which should
            be here any moment.
        fills: it fills time, and no other rank waits for it.
        opens: the gate of the next step, once every such row of the stage has started.
        in_flight: what its start adds to the microbatches in flight on this rank.
        held: what its start adds to the microbatches that hold memory on this rank.
    """

    kind: AnyKind
    needs: tuple[Need, ...]
    turn: Turn
    then: Callable[[Task], Iterable[Message]] = nothing
    completes: Callable[[Task, int], Iterable[Message]] | None = None
    bucket: int | None = None
    queue: Queue = OnDevice.COMPUTE
    admitted: Leave = always
    early: Leave = never
    fills: bool = False
    opens: Gate | None = None
    in_flight: int = 0
    held: int = 0


@dataclass(frozen=True, slots=True)
class StageHere:
    """A stage on this rank, as the rules see it.

    Args:
        job: of the run.
        seat: the stage, and the pipe that it belongs to here.
        buckets: who holds each of its buckets, itself included.
    """

    job: Job
    seat: Seat
    buckets: tuple[Copies, ...] = ()

    @property
    def is_first(self) -> bool:
        return self.seat.stage == 0

    @property
    def is_last(self) -> bool:
        return self.seat.stage == self.job.last_stage

    @property
    def recomputes(self) -> bool:
        """Some of its layers run again before a backward."""
        return self.job.trains and self.seat.stage in self.job.recomputed

    @property
    def back(self) -> Kind:
        """The kind that sends a gradient back."""
        return Kind.INPUT if self.job.splits else Kind.BACKWARD

    @property
    def completes(self) -> Kind:
        """The kind that completes a microbatch's gradient of the weights."""
        return Kind.WEIGHT if self.job.splits else Kind.BACKWARD
