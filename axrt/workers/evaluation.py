"""Runs the forwards of an evaluation."""

# Forwards run without a graph and keep nothing for a backward. The backwards of the table are kept,
# as empty tasks: what a policy allows in flight is bounded by them, so an evaluation needs no
# policy of its own, and no more memory for messages than a training.

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from axrt.model.stage import Stage
from axrt.runtime.losses import Losses
from axrt.scheduler.job import Job
from axrt.scheduler.message import Meaning
from axrt.scheduler.task import Kind, Task
from axrt.store.bucket import Bucket
from axrt.store.whole_weights import Check

from .losses import LossReader
from .worker import Made, Mail, Worker, nothing

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
            stage.
        bring: function that is called with the stage of each forward before it runs.
    Attributes:
        outputs: outputs of the last layer, one entry a microbatch, in order.
    """

    kinds = (Kind.FORWARD, Kind.BACKWARD)

    def __init__(
        self,
        job: Job,
        stages: Mapping[int, Stage],
        mail: Mail,
        keeps_outputs: bool,
        bring: Callable[[int], None] = lambda stage: None,
    ) -> None:
        self._bring = bring
        self._last, self._stages, self._mail = job.last_stage, stages, mail
        self._keeps_outputs = keeps_outputs
        self._losses = LossReader()
        self.outputs: list[Any] = []

    def losses(self) -> Losses:
        """The losses of the microbatches in order, on the rank that holds the last stage; they are
        let go."""
        return self._losses.take()

    def run(self, task: Task) -> Made:
        if task.kind is not Kind.FORWARD:
            return nothing
        _, stage, number, _ = task
        inputs = self._mail.take(Meaning.ACTIVATION, stage, number)
        self._bring(stage)
        if stage < self._last:
            outputs = self._stages[stage].evaluate(number, inputs, None)
            return lambda message: outputs
        outputs, loss = self._stages[stage].evaluate(
            number, inputs, self._mail.take(Meaning.TARGET, stage, number)
        )
        self._losses.start(number, *loss)
        if self._keeps_outputs:
            self.outputs.append(outputs)
        return nothing

    def complete(self, task: Task, made: Made) -> Made:
        if task.kind is Kind.FORWARD and task.stage == self._last:
            self._losses.read(
                task.microbatch,
                lambda: f"evaluation microbatch {task.microbatch}, stage {task.stage}",
            )
        return made
