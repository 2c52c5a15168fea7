"""Steps buckets: norms, the vote on them, and the optimizer."""

# The gradient that has been added up is divided by the weights of all losses and by the loss scale,
# once, when it is complete; whoever comes first of norm, scale and step does that (`_complete`).
# Then comes clipping, if any, and the optimizer.
#
# Clipping takes one norm of all norms, in the order of the model, as torch's does. It is taken on
# the host, where votes are read: on a device the host would have to wait for it in each step. There
# its last bit may differ from torch's. A vote with an infinite norm, or with a loss that is no
# number, makes every rank drop the step, and no rank changes anything before it has the vote.
#
# Without a vote a bucket steps as soon as its own gradient is complete. Norms are only told then.

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from axrt.runtime.losses import Losses, losses_of_members, mean_loss, total_weight
from axrt.scheduler.job import Job, StageCopy
from axrt.scheduler.message import Meaning, Message, numbers_of, sender_of
from axrt.scheduler.rules.clipping import voters_of
from axrt.scheduler.task import Kind, Task
from axrt.store.bucket import Bucket
from axrt.store.local_model import LocalModel
from axrt.store.norms import Norms, clip_factor, joined, total_norm, total_slope

from .worker import Made, Mail, Worker, nothing


class StepOutcome(NamedTuple):
    """The outcome of a step, once a rank has done it."""

    loss: float  # mean loss over all microbatches
    norm: float | None  # 2-norm of all gradients; None where no step waits for it
    skipped: bool  # True if the norm was no finite number, so that no rank has stepped


@dataclass(slots=True)
class _StepRecord:
    """The news of a step, and the figures of its buckets."""

    losses: dict[int, Losses] = field(default_factory=dict)  # losses of each pipe, by pipe
    # 2-norm of all gradients, a tensor with one element; None before the vote
    norm: Tensor | None = None
    # sum of change times gradient over all matrices, shape (); None where nothing is preconditioned
    slope: Tensor | None = None
    is_of_factors: bool = False  # because of which the step is dropped
    # norms of gradients, by stage and bucket
    norms: dict[int, dict[int, Norms]] = field(default_factory=lambda: defaultdict(dict))
    # change times gradient of each matrix, by stage and bucket
    slopes: dict[int, dict[int, Norms]] = field(default_factory=lambda: defaultdict(dict))
    # number of buckets whose step has ended, by stage
    ended: Counter[int] = field(default_factory=Counter)
    # (stage, bucket) pairs whose gradient is that of the whole batch
    complete: set[tuple[int, int]] = field(default_factory=set)

    def in_order(self, team: int) -> list[Losses]:
        """The losses of all pipes, those of the members of a team as one."""
        every = [self.losses[pipe] for pipe in sorted(self.losses)]
        if team == 1:
            return every
        return [
            losses_of_members(every[first : first + team]) for first in range(0, len(every), team)
        ]


class SteppingWorker(Worker):
    """Norms of a stage, the norm of all gradients, and the step of a bucket.

    Args:
        take_sums: function that puts the sums that have come into the bucket of a task.
        clip: largest 2-norm of all gradients; 0: no limit.
        tell_norms: function that is called with (step, stage, norms) when all buckets of a stage
            whose norms count have stepped without a vote.
        skip: function that is called with the index of a stage whose buckets do not step.
    """

    kinds = (
        *(Kind.PRECONDITION, Kind.NORM, Kind.VOTE, Kind.STEP, Kind.REFRESH),
        *(Kind.SCALE, Kind.HOST_STEP, Kind.LOAD),
    )

    def __init__(
        self,
        job: Job,
        model: LocalModel,
        take_sums: Callable[[Task], None],
        mail: Mail,
        clip: float,
        tell_norms: Callable[[int, int, Norms], None],
        skip: Callable[[int], None],
    ) -> None:
        self._job, self._buckets, self._pipe_of = job, model.buckets, model.pipes
        self._take_sums, self._mail = take_sums, mail
        self._clip, self._tell_norms = clip, tell_norms
        self._loss_scale, self._skip = model.loss_scale, skip
        self._voters = voters_of(job)
        self._records: dict[int, _StepRecord] = defaultdict(_StepRecord)
        self._run: dict[object, Callable[[Task], Made]] = {
            Kind.PRECONDITION: self._precondition,
            Kind.NORM: self._norm,
            Kind.VOTE: self._vote,
            Kind.STEP: self._step_and_send,
            Kind.REFRESH: self._refresh,
            Kind.SCALE: self._end_gradient,
            Kind.HOST_STEP: self._step_on_host,
            Kind.LOAD: self._load,
        }

    def hear_losses(self, message: Message, payload: Any) -> None:
        """Keep the losses of a pipe."""
        step, pipe = sender_of(message.number, self._job.pipes)
        self._records[step].losses[pipe] = Losses(*payload)

    def hear_vote(self, message: Message, payload: Any) -> None:
        """Keep the norm of all gradients, which says whether one has overflowed."""
        norm, slope = payload if self._job.preconditions else (payload, None)
        record = self._records[message.number]
        record.norm, record.slope = norm, slope
        if slope is not None and not slope.isfinite():  # a factor is no number
            record.is_of_factors = bool(norm.isfinite())
            record.norm = norm = torch.full_like(norm, math.nan)
        if self._loss_scale:
            self._loss_scale.judge(message.number, overflowed=not norm.isfinite())

    def outcome(self, step: int) -> StepOutcome:
        """The outcome of a step that this rank has done; to be asked for once, since it is let
        go."""
        record = self._records.pop(step)
        norm = None if record.norm is None else float(record.norm)
        loss = mean_loss(record.in_order(self._job.team))
        return StepOutcome(loss, norm, norm is not None and not math.isfinite(norm))

    def run(self, task: Task) -> Made:
        return self._run[task.kind](task)

    def complete(self, task: Task, made: Made) -> Made:
        record = self._records[task.microbatch]
        if task.kind is Kind.HOST_STEP and self._overflows(record):
            self._skip(task.stage)  # here, in order with the device's tasks
        if task.kind is Kind.LOAD:
            self._buckets[task.stage][task.part].route.leave_host()
        has_norms = task.kind in (Kind.STEP, Kind.SCALE)
        if has_norms and not self._job.votes and self._counts(task.stage):
            # Of those that have ended: others may have started, and their norms are not there yet.
            record.ended[task.stage] += 1
            if record.ended[task.stage] == len(self._buckets[task.stage]):
                norms = record.norms[task.stage].values()
                self._tell_norms(task.microbatch, task.stage, joined(norms))
        return made

    def _counts(self, stage: int) -> bool:
        """The norms of a stage here are some of those that make the norm of all gradients."""
        return StageCopy(self._pipe_of[stage], stage) in self._voters

    def _precondition(self, task: Task) -> Made:
        _, stage, step, part = task
        bucket, record = self._complete(task), self._records[step]
        record.norms[stage][part] = bucket.norms()  # before gradients are changed
        record.slopes[stage][part] = bucket.factors.precondition(bucket.route)
        return nothing

    def _norm(self, task: Task) -> Made:
        buckets = range(len(self._buckets[task.stage]))
        if self._job.preconditions:
            record, stage = self._records[task.microbatch], task.stage
            every = [
                [of[stage][bucket] for bucket in buckets] for of in (record.norms, record.slopes)
            ]
            return lambda message: tuple(map(joined, every))  # not before they are here
        norms = [self._complete(task._replace(part=bucket)).norms() for bucket in buckets]
        return lambda message: joined(norms)

    def _vote(self, task: Task) -> Made:
        numbers = numbers_of(task.microbatch, len(self._voters))
        heard = [self._mail.take(Meaning.NORM, 0, number) for number in numbers]
        slope = None
        if self._job.preconditions:
            slopes = [of_slopes for _, of_slopes in heard]
            heard = [norms for norms, _ in heard]
            slope = total_slope(slopes)
        norm = total_norm(heard)
        pipes = self._records[task.microbatch].in_order(self._job.team)
        if not all(math.isfinite(value) for losses in pipes for value in losses.values):
            # The gradient of a loss that is no number may be one all the same.
            norm = torch.full_like(norm, math.nan)
        return lambda message: norm if slope is None else (norm, slope)

    def _step(self, task: Task) -> None:
        self._end_gradient(task)
        if self._overflows(self._records[task.microbatch]):
            self._skip(task.stage)
        self._apply(task)

    def _refresh(self, task: Task) -> Made:
        self._buckets[task.stage][task.part].state.refresh()
        return nothing

    def _end_gradient(self, task: Task) -> Made:
        """Make the gradient that of the whole batch, and take its norms where no vote does."""
        bucket = self._complete(task)
        if not self._job.votes and self._counts(task.stage):
            self._records[task.microbatch].norms[task.stage][task.part] = bucket.norms()
        return nothing

    def _overflows(self, record: _StepRecord) -> bool:
        """The vote says that no rank steps."""
        return record.norm is not None and not record.norm.isfinite()

    def _apply(self, task: Task) -> None:
        """Step a bucket as the vote says, where there is one."""
        bucket, record = self._buckets[task.stage][task.part], self._records[task.microbatch]
        if self._overflows(record):
            if record.is_of_factors:
                bucket.factors.warn()
            bucket.forget_gradients()
            return
        if self._clip:
            assert record.norm is not None
            bucket.route.scale(clip_factor(record.norm, self._clip))
        if record.slope is not None:
            bucket.factors.hear(record.slope)
        bucket.step(task.microbatch)

    def _step_on_host(self, task: Task) -> Made:
        self._apply(task)
        return nothing

    def _load(self, task: Task) -> Made:
        self._buckets[task.stage][task.part].route.load()
        return self._new_weights(task)

    def _step_and_send(self, task: Task) -> Made:
        self._step(task)
        return self._new_weights(task)

    def _new_weights(self, task: Task) -> Made:
        """What each copy gets of the weights that were stepped here, where there are shards and
        weights are always whole."""
        shard = self._buckets[task.stage][task.part].shard
        if shard is None or self._job.residencies is not None:
            return nothing
        weights = shard.weights
        return lambda message: weights

    def _complete(self, task: Task) -> Bucket:
        """The bucket of a task, with the gradient of all microbatches of all copies."""
        bucket, record = self._buckets[task.stage][task.part], self._records[task.microbatch]
        if (task.stage, task.part) not in record.complete:
            record.complete.add((task.stage, task.part))
            self._take_sums(task)
            weight = total_weight(record.in_order(self._job.team))
            scale = self._loss_scale.of(task.microbatch) if self._loss_scale else None
            if weight is not None or scale is not None:
                factor = 1 / ((weight or 1.0) * (scale or 1.0))
                bucket.route.scale(factor)
                bucket.factors.scale(factor, weight)
        return bucket
