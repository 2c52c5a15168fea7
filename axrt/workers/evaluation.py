"""Runs the forwards of an evaluation."""

from collections.abc import Mapping
from typing import Any

from axrt.losses import Losses
from axrt.model.stage import Stage
from axrt.scheduler.job import Job
from axrt.scheduler.message import Meaning
from axrt.scheduler.task import Kind, Task

from .losses import LossReader
from .worker import Made, Mail, Worker, nothing


class EvaluationWorker(Worker):
    """Forwards without a graph; backwards keep the order and carry nothing.

    Args:
        job: schedule of the evaluation.
        stages: stages of this rank in evaluation mode, by number.
        mail: payloads of the session.
        keeps_outputs: True to keep the outputs of every microbatch, on the rank that holds the last
            stage.
    Attributes:
        outputs: outputs of the last layer, one entry a microbatch, in order.
    """

    kinds = (Kind.FORWARD, Kind.BACKWARD)

    def __init__(
        self, job: Job, stages: Mapping[int, Stage], mail: Mail, keeps_outputs: bool
    ) -> None:
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
