"""Runs forwards and backwards on the stages of a rank."""

from collections.abc import Callable, Mapping

from axrt.model.stage import Stage
from axrt.scheduler.job import Job
from axrt.scheduler.message import Meaning
from axrt.scheduler.task import Kind, Task

from .gradients import GradientWorker
from .losses import LossReader
from .worker import Made, Mail, Piece, Worker, nothing


class StageWorker(Worker):
    """Forwards, backwards in one piece or in several, and recomputation.

    Args:
        job: schedule of the run.
        stages: stages of this rank, by number.
        mail: payloads of the session.
        gradients: worker whose buckets the backwards add to.
        may_skip: True where an overflow skips a step (loss scaling), which then leaves buffers as
            they were before it.
    """

    kinds = (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)

    def __init__(
        self,
        job: Job,
        stages: Mapping[int, Stage],
        mail: Mail,
        gradients: GradientWorker,
        may_skip: bool = False,
    ) -> None:
        self._job, self._stages, self._mail, self._gradients = job, stages, mail, gradients
        self._last, self._losses, self._may_skip = job.last_stage, LossReader(may_skip), may_skip
        self._run: dict[object, Callable[[Task], Made]] = {
            Kind.FORWARD: self._forward,
            Kind.RECOMPUTE: self._recompute,
            Kind.BACKWARD: self._backward,
            Kind.INPUT: self._input,
            Kind.WEIGHT: self._weight,
        }

    def run(self, task: Task) -> Made:
        return self._run[task.kind](task)

    def piece_of(self, task: Task) -> Piece:
        stage, number = self._stages[task.stage], task.microbatch
        in_parts = self._leaves_in_parts(task)
        if task.kind is Kind.WEIGHT:
            more = stage.weight_pieces(number) > 1
            waiting = stage.waiting_parameters(number)[1:] if in_parts and more else []
            return Piece(
                more, self._gradients.complete_without(task.stage, waiting) if waiting else ()
            )
        more = in_parts and stage.backward_pieces(number) > 1
        return Piece(
            more,
            self._gradients.complete_from(task.stage, stage.next_piece(number)) if more else (),
        )

    def complete(self, task: Task, made: Made) -> Made:
        if task.kind is not Kind.FORWARD or task.stage != self._last:
            return made
        self._losses.read(task.microbatch, lambda: self._place_of(task))
        if len(self._losses) < self._job.microbatches_a_pipe:
            return nothing
        losses = tuple(self._losses.take())
        return lambda message: losses

    def _place_of(self, task: Task) -> str:
        step, microbatch = self._job.step_of(task.microbatch)
        return f"step {step}, stage {task.stage}, microbatch {microbatch}"

    def _leaves_in_parts(self, task: Task) -> bool:
        """Some buckets may leave before the task's backward is done."""
        return task.stage in self._gradients.leaving_in_parts and self._job.ends_a_run(
            task.microbatch
        )

    def _forward(self, task: Task) -> Made:
        _, stage, number, _ = task
        inputs = self._mail.take(Meaning.ACTIVATION, stage, number)
        target = self._mail.take(Meaning.TARGET, stage, number) if stage == self._last else None
        if self._may_skip and self._job.begins_a_step(number):
            self._stages[stage].remember_buffers()
        in_pieces = self._leaves_in_parts(task) and not self._job.splits
        outputs = self._stages[stage].forward(number, inputs, target, in_pieces)
        if stage == self._last:
            self._losses.start(number, *outputs)
        return lambda message: outputs

    def _recompute(self, task: Task) -> Made:
        self._stages[task.stage].recompute(task.microbatch)
        return nothing

    def _backward(self, task: Task) -> Made:
        _, stage, number, _ = task
        piece = self.piece_of(task)
        self._begin(task)
        given = self._mail.take(Meaning.GRADIENT, stage, number)
        if piece.more or task.part:
            gradients = self._stages[stage].backward_piece(number, given)
        else:
            gradients = self._stages[stage].backward(number, given)
        self._end(task, piece)
        return lambda message: (
            self._gradients.part(message) if message.meaning.of_a_bucket else gradients
        )

    def _input(self, task: Task) -> Made:
        _, stage, number, _ = task
        self._begin(task)
        gradients = self._stages[stage].input_gradient(
            number, self._mail.take(Meaning.GRADIENT, stage, number)
        )
        return lambda message: gradients

    def _weight(self, task: Task) -> Made:
        piece = self.piece_of(task)
        self._stages[task.stage].weight_gradient(task.microbatch)
        self._end(task, piece)
        return self._gradients.part

    def _begin(self, task: Task) -> None:
        """See to it that a backward adds to memory that is the gradient's own."""
        if task.part > 0:
            return
        if self._job.begins_a_run(task.microbatch):
            self._gradients.open(task.stage)
        else:
            self._gradients.keep_open(task.stage)

    def _end(self, task: Task, piece: Piece) -> None:
        """Close the gradients that the last backward of a step, or of a reduction, on a stage has
        completed."""
        number = task.microbatch
        if self._job.ends_a_run(number):
            step = self._job.step_of(number)[0] if self._job.ends_a_step(number) else None
            self._gradients.close(task.stage, step, piece.completes if piece.more else None)
