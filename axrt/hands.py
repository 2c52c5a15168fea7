"""The hands of a rank: they run the tasks that the brain picks, and keep what messages carry until it is needed.

Two kinds: of the training, and of an evaluation. What is true of microbatches is the brain's; the hands know payloads only.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from axrt.model.stage import Stage, check_finite
from axrt.optim.step import StageOptimizer
from axrt.scheduler.message import Meaning, Message
from axrt.scheduler.task import Kind, Task


class Hands(Protocol):
    """What the loop asks of them."""

    def put(self, message: Message, payload: Any) -> None:
        """Keep what came with a message until the task that needs it runs."""
        ...

    def run(self, task: Task) -> None:
        """Do it, on the current device and stream; its inputs are there."""
        ...

    def settle(self, task: Task) -> None:
        """The task has finished on the device: look at what it made."""
        ...

    def payload_of(self, message: Message) -> Any:
        """What goes out with a message that follows from a finished task; given away once."""
        ...


class _Mail:
    """Payloads by message: those that wait for a task here, and those that wait to go out."""

    def __init__(self, stages: Mapping[int, Stage]) -> None:
        self._stages = stages
        self._in: dict[Message, Any] = {}
        self._out: dict[Message, Any] = {}

    def put(self, message: Message, payload: Any) -> None:
        if payload is not None:
            (self._in if message.stage in self._stages else self._out)[message] = payload

    def take(self, meaning: Meaning, task: Task) -> Any:
        return self._in.pop(Message(meaning, task.stage, task.microbatch), None)

    def payload_of(self, message: Message) -> Any:
        return self._out.pop(message, None)


class TrainingHands:
    """Forward, backward and step, each on a stage of this rank.

    Args:
        stages: of this rank, by number.
        optimizers: one a stage.
        microbatches: per step.
        last_stage: the number of the stage that computes the loss.
        tell_loss: called with (step, losses in order of microbatches) when the last loss of a step is known.
        tell_norms: called with (step, stage, norms) when a stage's gradients are complete.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        optimizers: Mapping[int, StageOptimizer],
        microbatches: int,
        last_stage: int,
        tell_loss: Callable[[int, list[float]], None],
        tell_norms: Callable[[int, int, torch.Tensor], None],
    ) -> None:
        self._stages = stages
        self._optimizers = optimizers
        self._microbatches = microbatches
        self._last_stage = last_stage
        self._tell_loss = tell_loss
        self._tell_norms = tell_norms
        self._mail = _Mail(stages)
        self._losses_on_device: dict[int, torch.Tensor] = {}
        self._losses: list[float] = []
        self._norms: dict[Task, torch.Tensor] = {}
        self._run = {Kind.FORWARD: self._forward, Kind.BACKWARD: self._backward, Kind.STEP: self._step}
        self.put, self.payload_of = self._mail.put, self._mail.payload_of

    def run(self, task: Task) -> None:
        self._run[task.kind](task)

    def settle(self, task: Task) -> None:
        if task.kind is Kind.FORWARD and task.stage == self._last_stage:
            self._settle_loss(task)
        elif task.kind is Kind.STEP:
            self._tell_norms(task.microbatch, task.stage, self._norms.pop(task))

    def _forward(self, task: Task) -> None:
        inputs, target = self._mail.take(Meaning.ACTIVATION, task), self._mail.take(Meaning.TARGET, task)
        outputs = self._stages[task.stage].forward(task.microbatch, inputs, target)
        if task.stage == self._last_stage:
            self._losses_on_device[task.microbatch] = outputs.to("cpu", non_blocking=True)
        else:
            self._mail.put(Message(Meaning.ACTIVATION, task.stage + 1, task.microbatch), outputs)

    def _backward(self, task: Task) -> None:
        gradients = self._stages[task.stage].backward(task.microbatch, self._mail.take(Meaning.GRADIENT, task))
        if task.stage > 0:
            self._mail.put(Message(Meaning.GRADIENT, task.stage - 1, task.microbatch), gradients)

    def _step(self, task: Task) -> None:
        optimizer = self._optimizers[task.stage]
        self._norms[task] = optimizer.norms()
        optimizer.step(task.microbatch)

    def _settle_loss(self, task: Task) -> None:
        loss = float(self._losses_on_device.pop(task.microbatch))
        step, microbatch = divmod(task.microbatch, self._microbatches)
        check_finite(loss, f"step {step}, stage {task.stage}, microbatch {microbatch}")
        self._losses.append(loss)
        if len(self._losses) == self._microbatches:
            self._tell_loss(step, self._losses)
            self._losses = []


class EvaluationHands:
    """Forwards without a graph; backwards keep the order and carry nothing.

    Args:
        stages: of this rank, by number, in evaluation mode.
        last_stage: the number of the stage that computes the loss.
    """

    def __init__(self, stages: Mapping[int, Stage], last_stage: int) -> None:
        self._stages = stages
        self._last_stage = last_stage
        self._mail = _Mail(stages)
        self._on_device: dict[int, torch.Tensor] = {}
        self.losses: list[float] = []  # of the microbatches in order, on the rank that holds the last stage
        self.put, self.payload_of = self._mail.put, self._mail.payload_of

    def run(self, task: Task) -> None:
        if task.kind is not Kind.FORWARD:
            return
        inputs, target = self._mail.take(Meaning.ACTIVATION, task), self._mail.take(Meaning.TARGET, task)
        outputs = self._stages[task.stage].evaluate(task.microbatch, inputs, target)
        if task.stage == self._last_stage:
            self._on_device[task.microbatch] = outputs.to("cpu", non_blocking=True)
        else:
            self._mail.put(Message(Meaning.ACTIVATION, task.stage + 1, task.microbatch), outputs)

    def settle(self, task: Task) -> None:
        if task.microbatch in self._on_device:
            loss = float(self._on_device.pop(task.microbatch))
            check_finite(loss, f"evaluation microbatch {task.microbatch}, stage {task.stage}")
            self.losses.append(loss)
