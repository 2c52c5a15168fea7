"""Layers that keep nothing and run again: the same bits, fewer bytes."""

import weakref
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import axrt
from axrt.model.layer_runs import RunSettings
from axrt.model.seeds import BorrowedGenerator
from axrt.model.stage import Stage
from axrt.observe.observer import Observer
from axrt.scheduler.placement import Linear, placement_by_name
from axrt.scheduler.planning.recompute import most_recomputed, recomputed_layers, recomputed_shares
from axrt.scheduler.policies import NAMES, placement_for, policy_by_name
from axrt.scheduler.task import Kind, Task
from axrt.transport import Transport
from axrt.transport.local import LocalWorld

from ..model.test_stage import alone
from ..sweeps import swept
from .models import Block, motley, perceptron
from .reference import (
    CPU,
    ONE_PIPE,
    Outcome,
    configured,
    random_batches,
    together,
    train_in_plain_torch,
    train_on_a_rank,
)
from .test_weighted_losses import batches as weighted_batches
from .test_weighted_losses import model as weighted_model

MICROBATCHES, STEPS = 12, 3
BATCHES = random_batches((6, 16), classes=5, microbatches=MICROBATCHES)
MOTLEY_BATCHES = random_batches((6, 12), classes=4, microbatches=MICROBATCHES)


def on_ranks(
    ranks: int,
    recompute: str | int,
    policy: str = "1f1b",
    model: Any = perceptron,
    batches: Any = BATCHES,
    **of: Any,
) -> Outcome:
    config = configured(
        MICROBATCHES, schedule={"policy": policy}, memory={"recompute": recompute}, **of
    )
    whole = model()
    return together(
        LocalWorld(ranks, 3).run(
            lambda transport: train_on_a_rank(transport, whole, batches, STEPS, config)
        )
    )


@pytest.fixture(scope="module")
def reference() -> Outcome:
    return train_in_plain_torch(perceptron(), BATCHES, STEPS)


@swept(("policy", ONE_PIPE), ("recompute", ["full", 1, "stage-aware:0.6"]), quick=6)
def test_every_policy_has_the_bits_of_plain_torch_dropout_included(
    reference: Outcome, policy: str, recompute: str | int
) -> None:
    assert on_ranks(2, recompute, policy) == reference


@swept(("policy", ["gpipe", "merak", "varuna", "zb-h2"]), ("ranks", [1, 3, 4]))
def test_at_any_depth(reference: Outcome, ranks: int, policy: str) -> None:
    assert on_ranks(ranks, "full", policy) == reference


def test_structured_activations_and_layers_that_work_in_place() -> None:
    assert on_ranks(3, "full", "gpipe", motley, MOTLEY_BATCHES) == train_in_plain_torch(
        motley(), MOTLEY_BATCHES, STEPS
    )

    def in_place() -> axrt.PipelineModule:
        linear, leaky = (
            axrt.LayerSpec(nn.Linear, 16, 16),
            axrt.LayerSpec(nn.LeakyReLU, 0.1, inplace=True),
        )
        layers = [axrt.LayerSpec(Block, 16), linear, leaky, axrt.LayerSpec(nn.Linear, 16, 5)]
        return axrt.PipelineModule(layers, functional.cross_entropy)

    # the second stage begins with one that works in place
    whole = {"parallel": {"partition": [0, 2, 4]}}
    assert on_ranks(2, "full", "gpipe", in_place, **whole) == train_in_plain_torch(
        in_place(), BATCHES, STEPS
    )


class Decays(nn.Module):
    """A buffer that every forward changes and that the output shows, as a running scale would."""

    scale: Tensor

    def __init__(self, rebinds: bool) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.linear, self.rebinds = nn.Linear(16, 16), rebinds

    def forward(self, value: Tensor) -> Tensor:
        if self.rebinds:
            self.scale = self.scale * 0.9
        else:
            self.scale.mul_(0.9)
        out: Tensor = self.linear(value) * self.scale.clone()
        return out


class Normed(nn.Module):
    """Its weight depends on buffers that every forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))

    def forward(self, value: Tensor) -> Tensor:
        out: Tensor = self.linear(value)
        return out


@pytest.mark.parametrize("layer", ["spectral norm", "rebinds", "in place"])
def test_layers_see_their_buffers_as_they_were(layer: str) -> None:
    def model() -> axrt.PipelineModule:
        first = (
            axrt.LayerSpec(Normed)
            if layer == "spectral norm"
            else axrt.LayerSpec(Decays, layer == "rebinds")
        )
        return axrt.PipelineModule(
            [first, axrt.LayerSpec(Block, 16), axrt.LayerSpec(nn.Linear, 16, 5)],
            functional.cross_entropy,
        )

    def train(recompute: str) -> Outcome:
        return on_ranks(1, recompute, "gpipe", model)

    assert train("full") == train("none")


@dataclass
class Boxed:
    """What cannot travel."""

    value: Tensor


class Box(nn.Module):
    def forward(self, value: Tensor) -> Boxed:
        return Boxed(2 * value)


class Unbox(nn.Module):
    def forward(self, boxed: Boxed) -> Tensor:
        return boxed.value + 1


def test_what_cannot_travel_may_pass_within_what_runs_again() -> None:
    def model() -> axrt.PipelineModule:
        box, unbox, linear = (
            axrt.LayerSpec(Box),
            axrt.LayerSpec(Unbox),
            axrt.LayerSpec(nn.Linear, 16, 5),
        )
        return axrt.PipelineModule(
            [axrt.LayerSpec(Block, 16), box, unbox, linear, box],
            lambda boxed, target: functional.cross_entropy(boxed.value, target),
        )

    assert on_ranks(1, "full", "gpipe", model) == train_in_plain_torch(model(), BATCHES, STEPS)
    assert on_ranks(1, 3, "gpipe", model) == train_in_plain_torch(model(), BATCHES, STEPS)
    with pytest.raises(TypeError, match="Boxed cannot travel") as error:
        on_ranks(1, 2, "gpipe", model)
    assert "memory.recompute cuts the stage before layer 2" in str(error.value.__notes__)


def test_weighted_losses_bfloat16_and_clipping() -> None:
    weighted = train_in_plain_torch(weighted_model(), weighted_batches(4), STEPS)
    assert on_ranks(2, "full", "gpipe", weighted_model, weighted_batches(4)) == weighted
    half = train_in_plain_torch(perceptron(), BATCHES, STEPS, compute=torch.bfloat16)
    assert on_ranks(2, "full", "gpipe", precision={"compute": "bfloat16"}) == half
    clipped = train_in_plain_torch(perceptron(), BATCHES, STEPS, clip=0.5)
    outcome = on_ranks(1, "full", "gpipe", optimizer={"clip": 0.5})
    assert outcome == clipped


def test_running_means_see_each_microbatch_once() -> None:
    def normed() -> axrt.PipelineModule:
        return axrt.PipelineModule(
            [axrt.LayerSpec(nn.BatchNorm1d, 16), axrt.LayerSpec(nn.Linear, 16, 5)],
            functional.cross_entropy,
        )

    def means(recompute: str) -> Tensor:
        config = configured(
            MICROBATCHES, schedule={"policy": "gpipe"}, memory={"recompute": recompute}
        )
        with axrt.initialize(normed(), config=config, transport=LocalWorld(1).alone()) as engine:
            engine.train_batch(iter(BATCHES(0)))
            return torch.cat(
                [
                    buffer.flatten().float()
                    for _, layer in engine._model.layers()
                    for buffer in layer.buffers()
                ]
            )

    assert torch.equal(means("none"), means("full"))


class Again(Observer):
    """The tasks that ran."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []

    def started(self, task: Task) -> None:
        self.tasks.append(task)


def test_only_ranks_that_hold_more_than_one_microbatch_recompute() -> None:
    def rank_main(transport: Transport) -> int:
        watch = Again()
        config = configured(
            MICROBATCHES, schedule={"policy": "merak"}, memory={"recompute": "full"}
        )
        train_on_a_rank(transport, perceptron(), BATCHES, 1, config, observers=[watch])
        return sum(task.kind is Kind.RECOMPUTE for task in watch.tasks)

    assert LocalWorld(3).run(rank_main) == [MICROBATCHES, MICROBATCHES, 0]


@pytest.mark.parametrize("recomputed", [0, 2, 4])
def test_what_runs_again_keeps_no_graph_between_forward_and_backward(recomputed: int) -> None:
    """Of four blocks the graph of those that do not run again is all that is left, and nothing of
    it after the backward."""
    torch.manual_seed(0)
    stage = Stage(
        [Counted() for _ in range(4)],
        0,
        None,
        RunSettings(alone(2), BorrowedGenerator(7, CPU)),
        recomputed,
    )
    Counted.alive.clear()
    stage.forward(0, torch.randn(6, 16, requires_grad=True), None)
    assert len(Counted.alive) == 2 * (4 - recomputed)
    if recomputed:
        stage.recompute(0)
    assert len(Counted.alive) == 2 * 4
    (gradient,) = stage.backward(0, (torch.ones(6, 16),))
    assert gradient is not None
    assert not Counted.alive
    assert all(parameter.grad is not None for parameter in stage.layers.parameters())


class Counted(nn.Linear):
    """Counts the activations that its graphs keep."""

    alive: ClassVar["weakref.WeakSet[_Kept]"] = weakref.WeakSet()

    def __init__(self) -> None:
        super().__init__(16, 16)

    def forward(self, value: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept.tensor):
            return super().forward(value).tanh()

    def _keep(self, tensor: Tensor) -> "_Kept":
        kept = _Kept(tensor.detach())
        if tensor.shape == (6, 16):  # what came in, and what tanh returned
            self.alive.add(kept)
        return kept


class _Kept:
    """A tensor that a graph holds."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def test_each_stage_recomputes_what_its_microbatches_in_flight_leave_no_room_for() -> None:
    """Published for 1f1b: 1 - (1 - r0)(p - 1) / (p - 1 - r), and nothing on the last stage."""
    p, most = 8, 0.75
    shares = recomputed_shares(policy_by_name("1f1b"), Linear(p), 16, most)
    for stage in range(p):
        published = 1 - (1 - most) * (p - 1) / (p - 1 - stage) if stage < p - 1 else 0.0
        assert shares.get(stage, 0.0) == pytest.approx(max(published, 0.0))
    assert recomputed_shares(policy_by_name("1f1b"), Linear(4), 8) == dict.fromkeys(range(3), 1.0)
    assert recomputed_shares(policy_by_name("gpipe"), Linear(4), 8) == dict.fromkeys(range(4), 1.0)
    for name in NAMES:
        where = placement_for(policy_by_name(name), 4, 8)
        assert set(recomputed_shares(policy_by_name(name), where, 8)) >= set(
            range(placement_by_name("linear", 4).stages - 1)
        ), name


def test_shares_become_whole_layers_and_a_number_is_one() -> None:
    assert recomputed_layers("stage-aware", {0: 0.5, 1: 0.34}, {0: 3, 1: 3}) == {0: 2, 1: 2}
    assert recomputed_layers("full", {0: 1.0}, {0: 3, 1: 3}) == {0: 3}
    assert recomputed_layers(2, {0: 1.0, 1: 1.0}, {0: 3, 1: 1}) == {0: 2, 1: 1}
    assert [
        most_recomputed(word) for word in ("none", "full", "stage-aware", "stage-aware:0.8", 0, 3)
    ] == [0, 1, 0.5, 0.8, 0, 1]


@pytest.mark.parametrize("recompute", ["half", "stage-aware:2", "stage-aware:", "full:1", -1])
def test_what_says_nothing_is_refused(recompute: str | int) -> None:
    with pytest.raises(
        axrt.ConfigError,
        match="memory.recompute = .*; expected 'none', 'full', 'stage-aware'",
    ):
        axrt.Config.read({"memory": {"recompute": recompute}})
