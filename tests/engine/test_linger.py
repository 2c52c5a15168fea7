"""A rank that waits a moment for what is due, on a transport on which time passes."""

import os
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import axrt
from axrt.scheduler.job import Job
from axrt.scheduler.linger import LINGER, Linger
from axrt.scheduler.numbering import StageJoints
from axrt.scheduler.placement import Linear
from axrt.scheduler.policies import policy_by_name
from axrt.scheduler.rank_state import RankState
from axrt.scheduler.rules import Queue
from axrt.scheduler.task import Kind, Task
from axrt.transport.local import LocalTransport, LocalWorld

from .conftest import QUEUE
from .reference import configured, together, train_in_plain_torch, train_on_a_rank

MICROBATCHES, STEPS, RANKS = 6, 3, 3
WEIGHT_S = 2e-3


class Slow(torch.autograd.Function):
    """Times a weight, whose gradient takes its time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        x: Tensor
        x, weight = ctx.saved_tensors

        def product() -> Tensor:
            time.sleep(WEIGHT_S)
            return (gradient * x).sum(0)

        return gradient * weight, axrt.defer_weight_gradient(weight, product)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return Slow.apply(x, self.weight)  # type: ignore[no-any-return, no-untyped-call]


def model() -> axrt.PipelineModule:
    return axrt.PipelineModule(
        [axrt.LayerSpec(Scale) for _ in range(2 * RANKS)],
        lambda out, target: (out - target).pow(2).mean(),
    )


def batches(step: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return [
        (torch.randn(3, 4, generator=generator), torch.randn(3, 4, generator=generator))
        for _ in range(MICROBATCHES)
    ]


@pytest.mark.skipif(QUEUE in os.environ, reason="on a thread nobody knows yet what a task takes")
@pytest.mark.parametrize("policy", ["zb-v", "adaptive"])
def test_what_is_early_starts_a_moment_later_and_bits_stay(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    since: dict[tuple[int, Task], float] = {}  # the rank, by its brain, and what it could start
    waited: list[float] = []
    picks, starts = Linger.pick, RankState.start

    def watched(
        linger: Linger, state: RankState, queue: Queue, now: float, *rest: Any
    ) -> Task | None:
        task = picks(linger, state, queue, now, *rest)
        deferred = state.pick(queue) if task is None else None
        if deferred is not None:
            since.setdefault((id(state), deferred), time.perf_counter())
        return task

    def started(state: RankState, task: Task, *of_a_piece: Any) -> Any:
        if (id(state), task) in since:
            waited.append(time.perf_counter() - since.pop((id(state), task)))
            assert task.kind is Kind.WEIGHT
        return starts(state, task, *of_a_piece)

    monkeypatch.setattr(LocalTransport, "takes_time", True)
    monkeypatch.setattr(Linger, "pick", watched)
    monkeypatch.setattr(RankState, "start", started)
    config = configured(
        MICROBATCHES, schedule={"policy": policy}, parallel={"partition": "uniform"}
    )
    ran = LocalWorld(RANKS, 0).run(
        lambda transport: train_on_a_rank(transport, model(), batches, STEPS, config)
    )
    assert together(ran) == train_in_plain_torch(model(), batches, STEPS)
    assert max(waited) > 0.9 * LINGER * WEIGHT_S


def test_where_no_time_passes_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(linger: Linger, now: float, takes: float) -> bool:
        raise AssertionError("a rank waits")

    monkeypatch.setattr(Linger, "defers", never)
    config = configured(
        MICROBATCHES, schedule={"policy": "zb-v"}, parallel={"partition": "uniform"}
    )
    LocalWorld(RANKS, 0).run(
        lambda transport: train_on_a_rank(transport, model(), batches, 1, config)
    )


def test_a_new_session_does_not_go_on_waiting() -> None:
    """A step that was dropped while the rank waited left the deadline behind, and the next session
    would have polled without rest."""
    engine = axrt.initialize(
        model(), config=configured(MICROBATCHES), transport=LocalWorld(1).alone()
    )
    engine._rank.loop._tasks.linger.defers(0.0, takes=1.0)
    engine._rank.loop._enter(engine._trainer.training)
    assert engine._rank.loop._tasks.linger.until is None
    engine.close()


def test_a_weight_gradient_that_was_held_up_once_does_not_make_the_rank_wait_as_long() -> None:
    linger, task = Linger(), Task(Kind.WEIGHT, 0, 0)
    for seconds in (1.0, 50.0):
        linger.took(task, seconds)
    assert linger._usual(task) == 2.0


def test_a_wait_for_slices_is_as_long_as_a_task_with_joints() -> None:
    """However long other work takes."""
    job = Job(
        Linear(2), policy_by_name("1f1b"), 2, team=2, joints={1: StageJoints(3, 2)}, fills=False
    )
    linger, state = Linger(), RankState(job, 0)
    assert linger._longest_at_joint(state) == 0.0
    for task, seconds in ((Task(Kind.FORWARD, 1, 0), 0.5), (Task(Kind.STEP, 1, 0), 50.0)):
        linger.took(task, seconds)
    assert linger._longest_at_joint(state) == 2.0
