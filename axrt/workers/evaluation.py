"""Runs the forwards of an evaluation."""

# Forwards run without a graph and keep nothing for a backward. The backwards of the table are kept,
# as empty tasks: what a policy allows in flight is bounded by them, so an evaluation needs no
# policy of its own, and no more memory for messages than a training. Where a team holds the stages
# a forward has a piece between two joints, as in a training; a backward has none.

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from axrt.model.stage import Stage
from axrt.model.virtual_members import VirtualMembers
from axrt.runtime.losses import Losses
from axrt.scheduler.job import Job
from axrt.scheduler.message import Meaning
from axrt.scheduler.task import AnyKind, Kind, Task
from axrt.store.bucket import Bucket
from axrt.store.whole_weights import Check

from .losses import LossReader
from .slices import SliceMail
from .worker import WHOLE, Made, Mail, Piece, Worker, nothing

_CHECKS_KEPT = 256


class WeightsOnDemand:
    """Weights in scratch that come to the device when a forward of an evaluation reads them, and go
    when others need their room: those that were read last, since microbatches go through all stages
    in turn. As a context it lets all go.

    Args:
        buckets: buckets of each stage whose weights are in scratch, by stage.
        capacity: number of stages whose weights may be here at a time.
    """

    def __init__(self, buckets: Mapping[int, Sequence[Bucket]], capacity: int) -> None:
        self._buckets, self._capacity = buckets, capacity
        self._here: list[int] = []  # the last one was read last
        self._checks: deque[Check] = deque()  # of those that have gone

    def bring(self, stage: int) -> None:
        """Have the weights of a stage here."""
        if stage not in self._buckets:
            return
        if stage in self._here:
            self._here.remove(stage)
        else:
            if len(self._here) == self._capacity:
                self._let_go(self._here.pop())
            for bucket in self._buckets[stage]:
                bucket.begin_residency()
        self._here.append(stage)

    def _let_go(self, stage: int) -> None:
        self._checks += [bucket.end_residency() for bucket in self._buckets[stage]]
        while len(self._checks) > _CHECKS_KEPT:  # of long ago: nobody waits for the device
            self._checks.popleft()()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        while self._here and error is None:
            self._let_go(self._here.pop())
        for check in self._checks if error is None else ():
            check()


class EvaluationWorker(Worker):
    """Forwards without a graph; backwards keep the order and carry nothing.

    Args:
        stages: stages of this rank in evaluation mode, by number.
        keeps_outputs: True to keep the outputs of every microbatch, on the rank that holds the last
            stage; in a team they are this member's, see `Outputs`.
        slices: slices of the other members of a team; None: there are none.
        bring: function that is called with the stage of each forward before it runs.
    Attributes:
        outputs: outputs of the last layer, one entry a microbatch, in order.
    """

    kinds = (Kind.FORWARD, Kind.BACKWARD)

    def __init__(
        self,
        job: Job,
        stages: Mapping[int, Stage | VirtualMembers],
        mail: Mail,
        keeps_outputs: bool,
        slices: SliceMail | None = None,
        bring: Callable[[int], None] = lambda stage: None,
    ) -> None:
        self._job, self._slices, self._bring = job, slices, bring
        self._last, self._stages, self._mail = job.last_stage, stages, mail
        self._keeps_outputs = keeps_outputs
        self._losses = LossReader()
        self.outputs: list[Any] = []

    def losses(self) -> Losses:
        """The losses of the microbatches in order, on the rank that holds the last stage; they are
        let go."""
        return self._losses.take()

    @property
    def in_known_pieces(self) -> Collection[AnyKind]:
        return (Kind.FORWARD,) if self._job.joints else ()

    def piece_of(self, task: Task) -> Piece:
        if task.kind is not Kind.FORWARD:
            return WHOLE
        return Piece(task.part < self._job.joints_of(task.stage).forward)

    def run(self, task: Task) -> Made:
        if task.kind is not Kind.FORWARD:
            return nothing
        _, stage, number, part = task
        if part == 0:
            self._bring(stage)
        made = self._evaluated(task)
        if self._slices is not None and self.piece_of(task).more:
            return self._slices.leaving(task, made.outgoing)
        if stage < self._last:
            return lambda message: made
        outputs, loss = made
        self._losses.start(number, *loss)
        if self._keeps_outputs:
            self.outputs.append(outputs)
        return nothing

    def _evaluated(self, task: Task) -> Any:
        """What a stage makes of a microbatch, or of its next piece."""
        _, stage, number, part = task
        given = None
        if part == 0:
            inputs = self._mail.take(Meaning.ACTIVATION, stage, number)
            target = self._mail.take(Meaning.TARGET, stage, number) if stage == self._last else None
            given = inputs, target
        if self._slices is None:
            assert given is not None, "a forward that nobody shares has one piece"
            return self._stages[stage].evaluation.run(number, *given)
        joints = self._job.joints_of(stage).forward
        came = self._slices.came(Meaning.SLICE, task, joints)
        return self._stages[stage].evaluation.run_piece(number, given, came)

    def complete(self, task: Task, made: Made) -> Made:
        is_forward = task.kind is Kind.FORWARD and not self.piece_of(task).more
        if is_forward and task.stage == self._last:
            self._losses.read(
                task.microbatch,
                lambda: f"evaluation microbatch {task.microbatch}, stage {task.stage}",
            )
        return made
