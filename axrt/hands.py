"""The hands of a rank: they run the tasks that the brain picks, and keep what messages carry until it is needed.

Two kinds: of the training, and of an evaluation. What is true is the brain's; the hands know payloads only.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from axrt.holding import Holding
from axrt.losses import Losses, check_all_weighted_or_none, mean_loss, total_weight
from axrt.model.stage import Stage, check_finite
from axrt.optim.bucket import Bucket, Norms, clip_factor, joined, total_norm
from axrt.scheduler.bucket import to_holders
from axrt.scheduler.job import Job
from axrt.scheduler.message import Meaning, Message
from axrt.scheduler.task import AnyKind, Kind, Task

Payloads = Callable[[Message], Any]  # what goes with each message that follows from a task


class Hands(Protocol):
    """What the loop asks of them."""

    def put(self, message: Message, payload: Any) -> None:
        """Keep what came with a message until the task that needs it runs."""
        ...

    def run(self, task: Task) -> Payloads:
        """Do it, on the current device and stream; its inputs are there. What it made is for later tasks of this device."""
        ...

    def follows(self, task: Task) -> bool:
        """The task is a piece of a weight gradient, and another one of the same comes after it."""
        ...

    def settle(self, task: Task) -> Payloads:
        """The task has finished on the device: what it made may be looked at and leave, and is given away."""
        ...


class _Mail:
    """Payloads that wait for a task, by what they came with; a rank has a stage of one pipe only."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Meaning, int, int, int], Any] = {}

    def put(self, message: Message, payload: Any) -> None:
        if payload is not None:
            meaning, stage, number, _, bucket = message
            self._kept[meaning, stage, number, bucket] = payload

    def take(self, meaning: Meaning, stage: int, number: int, bucket: int = 0) -> Any:
        return self._kept.pop((meaning, stage, number, bucket), None)


class _OnDevice:
    """Losses on their way to the host.

    Args:
        loss, weight: as the loss function returned them.
    """

    def __init__(self, loss: Tensor, weight: Tensor | float | None) -> None:
        self._loss = loss.to("cpu", non_blocking=True)
        self._weight = weight.to("cpu", non_blocking=True) if isinstance(weight, Tensor) else weight

    def read(self, where: str) -> tuple[float, float | None]:
        """When the device is done: (loss, weight); `NonFiniteLossError` with the place where one is no finite number."""
        loss, weight = float(self._loss), None if self._weight is None else float(self._weight)
        check_finite(loss, where)
        if weight is not None:
            check_finite(weight, where, what="weight of the loss")
        return loss, weight


def _losses(pairs: Sequence[tuple[float, float | None]]) -> Losses:
    weights = [weight for _, weight in pairs if weight is not None]
    check_all_weighted_or_none(len(weights), len(pairs))
    return Losses([loss for loss, _ in pairs], weights or None)


class StepOutcome(NamedTuple):
    """What a rank knows of a step when it has done it.

    Args:
        loss: the mean over all microbatches.
        norm: the 2-norm of all gradients, where steps are clipped.
        skipped: the norm was no finite number, and no rank has stepped.
    """

    loss: float
    norm: float | None
    skipped: bool


@dataclass(slots=True)
class _Step:
    """What has come of a step, and what its buckets have said."""

    losses: dict[int, Losses] = field(default_factory=dict)  # by pipe
    norm: Tensor | None = None
    norms: dict[int, dict[int, Norms]] = field(default_factory=lambda: defaultdict(dict))  # by stage and bucket
    complete: set[tuple[int, int]] = field(default_factory=set)  # stage and bucket

    def in_order(self) -> list[Losses]:
        return [self.losses[pipe] for pipe in sorted(self.losses)]


class TrainingHands:
    """Forward and backward on a stage of this rank, what adds gradients up, and the step of a bucket.

    Args:
        job: of the run.
        holding: stages and buckets of this rank.
        clip: the largest norm of all gradients; 0: no limit.
        tell_norms: called with (step, stage, norms) when all buckets of a stage of pipe 0 have stepped without a vote; those of other
            pipes are the same.
    """

    def __init__(self, job: Job, holding: Holding, clip: float, tell_norms: Callable[[int, int, Norms], None]) -> None:
        self._job = job
        self._stages, self._buckets, self._pipe_of = holding.stages, holding.buckets, holding.pipes
        self._last_stage = job.last_stage
        self._clip = clip
        self._tell_norms = tell_norms
        self._mail = _Mail()
        self._made: dict[Task, Payloads] = {}
        self._on_device: dict[int, _OnDevice] = {}
        self._losses: list[tuple[float, float | None]] = []
        self._steps: dict[int, _Step] = defaultdict(_Step)
        self._run: dict[AnyKind, Callable[[Task], Payloads]] = {
            Kind.FORWARD: self._forward,
            Kind.RECOMPUTE: self._recompute,
            Kind.BACKWARD: self._backward,
            Kind.INPUT: self._input,
            Kind.WEIGHT: self._weight,
            Kind.REDUCE: self._reduce,
            Kind.NORM: self._norm,
            Kind.VOTE: self._vote,
            Kind.STEP: self._step,
        }

    def put(self, message: Message, payload: Any) -> None:
        if message.meaning is Meaning.LOSS:
            step, pipe = divmod(message.number, self._job.pipes)
            self._steps[step].losses[pipe] = Losses(*payload)
        elif message.meaning is Meaning.VOTE:
            self._steps[message.number].norm = payload
        else:
            self._mail.put(message, payload)

    def run(self, task: Task) -> Payloads:
        made = self._made[task] = self._run[task.kind](task)
        return made

    def follows(self, task: Task) -> bool:
        return task.kind is Kind.WEIGHT and self._stages[task.stage].weight_pieces(task.microbatch) > 1

    def settle(self, task: Task) -> Payloads:
        made = self._made.pop(task)
        if task.kind is Kind.FORWARD and task.stage == self._last_stage:
            return self._settle_loss(task)
        if task.kind is Kind.STEP and not self._clip:
            self._settle_norms(task)
        return made

    def outcome(self, step: int) -> StepOutcome:
        """Of a step that this rank has done; forgotten when told."""
        of = self._steps.pop(step)
        norm = None if of.norm is None else float(of.norm)
        return StepOutcome(mean_loss(of.in_order()), norm, norm is not None and not math.isfinite(norm))

    def _forward(self, task: Task) -> Payloads:
        _, stage, number, _ = task
        inputs = self._mail.take(Meaning.ACTIVATION, stage, number)
        target = self._mail.take(Meaning.TARGET, stage, number) if stage == self._last_stage else None
        outputs = self._stages[stage].forward(number, inputs, target)
        if stage == self._last_stage:
            self._on_device[number] = _OnDevice(*outputs)
        return lambda message: outputs

    def _recompute(self, task: Task) -> Payloads:
        self._stages[task.stage].recompute(task.microbatch)
        return lambda message: None

    def _backward(self, task: Task) -> Payloads:
        _, stage, number, _ = task
        gradients = self._stages[stage].backward(number, self._mail.take(Meaning.GRADIENT, stage, number))
        parts = self._parts(stage, number)
        return lambda message: parts[message] if message.meaning is Meaning.PART else gradients

    def _input(self, task: Task) -> Payloads:
        _, stage, number, _ = task
        gradients = self._stages[stage].input_gradient(number, self._mail.take(Meaning.GRADIENT, stage, number))
        return lambda message: gradients

    def _weight(self, task: Task) -> Payloads:
        _, stage, number, _ = task
        last = not self.follows(task)
        self._stages[stage].weight_gradient(number)
        parts = self._parts(stage, number) if last else {}
        return parts.__getitem__

    def _parts(self, stage: int, number: int) -> dict[Message, Any]:
        """After a step's last backward the parts of a stage's shared buckets, for each holder one, by the messages that bring them."""
        step, _ = self._job.step_of(number)
        parts: dict[Message, Any] = {}
        if not self._job.ends_a_step(number):
            return parts
        for bucket in self._buckets[stage]:
            if bucket.shared:
                parts.update(zip(to_holders(Meaning.PART, bucket.holders, bucket.me, step), bucket.parts(), strict=True))
        return parts

    def _reduce(self, task: Task) -> Payloads:
        total = self._buckets[task.stage][task.part].add_up(self._from_holders(Meaning.PART, task))
        return lambda message: total

    def _norm(self, task: Task) -> Payloads:
        norms = [self._complete(task._replace(part=number)).norms() for number in range(len(self._buckets[task.stage]))]
        return lambda message: joined(norms)

    def _vote(self, task: Task) -> Payloads:
        stages = self._job.stages
        numbers = range(task.microbatch * stages, (task.microbatch + 1) * stages)
        norm = total_norm([self._mail.take(Meaning.NORM, 0, number) for number in numbers])
        return lambda message: norm

    def _step(self, task: Task) -> Payloads:
        bucket, of = self._complete(task), self._steps[task.microbatch]
        if self._clip:
            assert of.norm is not None
            if not of.norm.isfinite():
                bucket.forget_gradients()
                return lambda message: None
            bucket.scale(clip_factor(of.norm, self._clip))
        elif self._pipe_of[task.stage] == 0:
            of.norms[task.stage][task.part] = bucket.norms()
        bucket.step(task.microbatch)
        return lambda message: None

    def _complete(self, task: Task) -> Bucket:
        """The bucket, with the gradient of all microbatches of all holders."""
        bucket, of = self._buckets[task.stage][task.part], self._steps[task.microbatch]
        if (task.stage, task.part) not in of.complete:
            of.complete.add((task.stage, task.part))
            if bucket.shared:
                bucket.take_sums(self._from_holders(Meaning.SUM, task))
            weight = total_weight(of.in_order())
            if weight is not None:
                bucket.scale(1 / weight)
        return bucket

    def _from_holders(self, meaning: Meaning, task: Task) -> list[Any]:
        """What each holder of the task's bucket has sent for it, in the order of holders."""
        holders = len(self._buckets[task.stage][task.part].holders)
        numbers = range(task.microbatch * holders, (task.microbatch + 1) * holders)
        return [self._mail.take(meaning, task.stage, number, task.part) for number in numbers]

    def _settle_loss(self, task: Task) -> Payloads:
        step, microbatch = self._job.step_of(task.microbatch)
        self._losses.append(self._on_device.pop(task.microbatch).read(f"step {step}, stage {task.stage}, microbatch {microbatch}"))
        if len(self._losses) == self._job.microbatches_a_pipe:
            losses, self._losses = _losses(self._losses), []
            return lambda message: tuple(losses)
        return lambda message: None

    def _settle_norms(self, task: Task) -> None:
        norms = self._steps[task.microbatch].norms[task.stage]
        if len(norms) == len(self._buckets[task.stage]):
            self._tell_norms(task.microbatch, task.stage, joined(norms.values()))


class EvaluationHands:
    """Forwards without a graph; backwards keep the order and carry nothing.

    Args:
        job: the evaluation.
        stages: of this rank, by number, in evaluation mode.
        keeps_outputs: of every microbatch, on the rank that holds the last stage.
    """

    def __init__(self, job: Job, stages: Mapping[int, Stage], keeps_outputs: bool) -> None:
        self._stages = stages
        self._last_stage = job.last_stage
        self._keeps_outputs = keeps_outputs
        self._mail = _Mail()
        self._made: dict[Task, Payloads] = {}
        self._on_device: dict[int, _OnDevice] = {}
        self._losses: list[tuple[float, float | None]] = []
        self.outputs: list[Any] = []  # of the microbatches in order
        self.put = self._mail.put

    @property
    def losses(self) -> Losses:
        """Of the microbatches in order, on the rank that holds the last stage."""
        return _losses(self._losses)

    def follows(self, task: Task) -> bool:
        return False

    def run(self, task: Task) -> Payloads:
        made = self._made[task] = self._forward(task) if task.kind is Kind.FORWARD else lambda message: None
        return made

    def settle(self, task: Task) -> Payloads:
        if task.kind is Kind.FORWARD and task.stage == self._last_stage:
            where = f"evaluation microbatch {task.microbatch}, stage {task.stage}"
            self._losses.append(self._on_device.pop(task.microbatch).read(where))
        return self._made.pop(task)

    def _forward(self, task: Task) -> Payloads:
        _, stage, number, _ = task
        inputs = self._mail.take(Meaning.ACTIVATION, stage, number)
        target = self._mail.take(Meaning.TARGET, stage, number) if stage == self._last_stage else None
        outputs = self._stages[stage].evaluate(number, inputs, target)
        if stage == self._last_stage:
            outputs, loss = outputs
            self._on_device[number] = _OnDevice(*loss)
            if self._keeps_outputs:
                self.outputs.append(outputs)
        return lambda message: outputs
