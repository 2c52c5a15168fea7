"""A rank that waits a moment for what is due, on a transport on which time passes."""

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import axrt
from axrt.linger import Linger
from axrt.loop import Loop
from axrt.scheduler.state import LINGER, RankState
from axrt.scheduler.task import Kind, Task
from axrt.transport.local import LocalTransport, LocalWorld

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
    return axrt.PipelineModule([axrt.LayerSpec(Scale) for _ in range(2 * RANKS)], lambda out, target: (out - target).pow(2).mean())


def batches(step: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return [(torch.randn(3, 4, generator=generator), torch.randn(3, 4, generator=generator)) for _ in range(MICROBATCHES)]


@pytest.mark.parametrize("policy", ["zb-v", "adaptive"])
def test_what_is_early_starts_a_moment_later_and_bits_stay(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    since: dict[tuple[int, Task], float] = {}  # the rank, by its brain, and what it could start
    waited: list[float] = []
    lingers, starts = Loop._lingers, RankState.start

    def watched(loop: Loop, state: RankState, task: Task) -> bool:
        held_back = lingers(loop, state, task)
        if held_back:
            since.setdefault((id(state), task), time.perf_counter())
        return held_back

    def started(state: RankState, task: Task, more: bool = False) -> Any:
        if (id(state), task) in since:
            waited.append(time.perf_counter() - since.pop((id(state), task)))
            assert task.kind is Kind.WEIGHT
        return starts(state, task, more)

    monkeypatch.setattr(LocalTransport, "takes_time", True)
    monkeypatch.setattr(Loop, "_lingers", watched)
    monkeypatch.setattr(RankState, "start", started)
    config = configured(MICROBATCHES, schedule={"policy": policy}, parallel={"partition": "uniform"})
    ran = LocalWorld(RANKS, 0).run(lambda transport: train_on_a_rank(transport, model(), batches, STEPS, config))
    assert together(ran) == train_in_plain_torch(model(), batches, STEPS)
    assert max(waited) > 0.9 * LINGER * WEIGHT_S


def test_where_no_time_passes_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    held_back: list[bool] = []
    lingers = Loop._lingers

    def watched(loop: Loop, state: RankState, task: Task) -> bool:
        held_back.append(lingers(loop, state, task))
        return held_back[-1]

    monkeypatch.setattr(Loop, "_lingers", watched)
    config = configured(MICROBATCHES, schedule={"policy": "zb-v"}, parallel={"partition": "uniform"})
    LocalWorld(RANKS, 0).run(lambda transport: train_on_a_rank(transport, model(), batches, 1, config))
    assert held_back
    assert not any(held_back)


def test_a_rank_waits_a_share_of_what_the_weight_gradient_of_that_stage_takes() -> None:
    now = [10.0]
    linger = Linger(lambda: now[0])
    linger.begin(3)
    assert linger.left_s == 0.0  # nothing is known yet
    linger.end()
    assert linger.left_s is None
    linger.took(3, 1.0)
    linger.took(5, 0.1)
    linger.begin(3)
    now[0] += 0.05
    linger.begin(5)  # it waits already
    assert linger.left_s == pytest.approx(LINGER - 0.05)
    now[0] += 1
    assert linger.left_s == 0.0


def test_a_weight_gradient_that_was_held_up_once_does_not_make_the_rank_wait_as_long() -> None:
    linger = Linger(lambda: 0.0)
    for seconds in (1.0, 50.0):
        linger.took(0, seconds)
    linger.begin(0)
    assert linger.left_s == pytest.approx(2 * LINGER)


def test_a_new_session_does_not_go_on_waiting() -> None:
    """A step that was dropped while the rank waited left the deadline behind, and the next session would have polled without rest."""
    engine = axrt.initialize(model(), config=configured(MICROBATCHES), transport=LocalWorld(1).alone())
    engine._loop._linger.begin(0)
    engine.train_batch(iter(batches(0)))
    assert engine._loop._linger.left_s is None
    engine._loop._linger.begin(0)
    engine._loop._enter(engine._training)
    assert engine._loop._linger.left_s is None
    engine.close()
