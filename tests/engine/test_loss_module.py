"""A loss that is a module: what it has is trained, clipped, listed, saved and evaluated as in plain
PyTorch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import axrt
from axrt.transport import Transport
from axrt.transport.local import LocalWorld

from ..sweeps import swept
from .models import Block
from .reference import (
    Outcome,
    adamw,
    configured,
    random_batches,
    together,
    train_in_plain_torch,
    train_on_a_rank,
)

MICROBATCHES, STEPS, WIDTH, CLASSES = 4, 3, 16, 5
BATCHES = random_batches((6, WIDTH), classes=CLASSES, microbatches=MICROBATCHES)


class Scored(nn.Module):
    """Weights, dropout, a buffer that counts what it has seen, and work in place on the target."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.score = nn.Linear(WIDTH, CLASSES)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.still = nn.Parameter(torch.ones(CLASSES), requires_grad=False)
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, value: Tensor, target: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        logits = self.score(self.dropout(value)) * self.temperature + self.still
        target.add_(1).remainder_(CLASSES)
        loss: Tensor = functional.cross_entropy(logits, target)
        return loss


def model() -> axrt.PipelineModule:
    return axrt.PipelineModule([axrt.LayerSpec(Block, WIDTH) for _ in range(4)], Scored())


def batches(step: int) -> list[Any]:
    """Anew each time: the loss changes targets."""
    return [(inputs.clone(), target.clone()) for inputs, target in BATCHES(step)]


def on_ranks(pipe: int, data: int, **sections: Any) -> Outcome:
    config = configured(MICROBATCHES // data, parallel={"data": data}, **sections)
    outcomes = LocalWorld(pipe * data).run(
        lambda transport: train_on_a_rank(transport, model(), batches, STEPS, config)
    )
    return together(outcomes, data)


@swept(
    ("policy", ["1f1b", "zb-h1", "zb-v", "breadth-first"]),
    ("memory", [{}, {"recompute": "full"}, {"recompute": "full", "bucket_mb": 0.0005}]),
    ("pipe", [1, 2]),
    ("clip", [0.0, 0.3]),
    quick=8,
)
def test_what_a_loss_has_is_trained_with_the_bits_of_plain_torch(
    policy: str, memory: dict[str, Any], pipe: int, clip: float
) -> None:
    sections = {"memory": memory, "schedule": {"policy": policy}, "optimizer": {"clip": clip}}
    found = on_ranks(pipe, 1, **sections)
    expected = train_in_plain_torch(model(), batches, STEPS, clip=clip)
    assert found.parameters.keys() == expected.parameters.keys()
    assert {"4.loss.score.weight", "4.loss.temperature"} < found.parameters.keys()
    assert found.losses == expected.losses
    for name, value in expected.parameters.items():
        assert torch.equal(found.parameters[name], value), name


@pytest.mark.parametrize("memory", [{}, {"zero": 1}, {"zero": 3}, {"offload": "stream"}])
def test_replicas_and_shards_train_it_alike(memory: dict[str, Any]) -> None:
    plain, found = on_ranks(2, 2), on_ranks(2, 2, memory=memory)
    assert found.losses == plain.losses  # norms are added up in another order
    for name, value in found.parameters.items():
        assert torch.equal(plain.parameters[name], value), name
    expected = train_in_plain_torch(model(), batches, STEPS)
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_it_is_evaluated_saved_and_given_back(tmp_path: Path, ranks: int, recompute: str) -> None:
    config = configured(MICROBATCHES, memory={"recompute": recompute})

    def first(transport: Transport) -> tuple[float, nn.Module]:
        mine = model()
        with axrt.initialize(mine, adamw, config=config, transport=transport) as engine:
            engine.train_batch(iter(batches(0)))
            loss = engine.eval_batch(iter(batches(1))).loss
            engine.save_checkpoint(tmp_path / "saved")
            assert engine.eval_batch(iter(batches(1))).loss == loss, "nothing is drawn or counted"
        assert isinstance(mine.loss_fn, nn.Module)
        return loss, mine.loss_fn

    def second(transport: Transport) -> tuple[float, nn.Module]:
        mine = model()
        with axrt.initialize(mine, adamw, config=config, transport=transport) as engine:
            engine.train_batch(iter(batches(5)))
            engine.load_checkpoint(tmp_path / "saved")
            loss = engine.eval_batch(iter(batches(1))).loss
        assert isinstance(mine.loss_fn, nn.Module)
        return loss, mine.loss_fn

    def of_last_stage(one: Any) -> tuple[float, Any]:
        """What the rank found that computes the loss."""
        found: list[tuple[float, Any]] = LocalWorld(ranks).run(one)
        return max(found, key=lambda of: float(of[1].seen))

    (loss, scored), (again, loaded) = of_last_stage(first), of_last_stage(second)
    assert loss == again
    assert float(scored.seen) == MICROBATCHES, "once for each result, whatever runs again"
    for (name, one), (_, other) in zip(
        scored.state_dict().items(), loaded.state_dict().items(), strict=True
    ):
        assert torch.equal(one, other), name
    assert not torch.equal(scored.score.weight, Scored().score.weight)


def test_a_loss_without_weights_stays_no_layer_and_is_evaluated_as_such() -> None:
    class Dropped(nn.Module):
        def forward(self, value: Tensor, target: Tensor) -> Tensor:
            return functional.cross_entropy(functional.dropout(value, 0.5, self.training), target)

    layer = nn.Linear(WIDTH, CLASSES)
    made = axrt.PipelineModule([layer], Dropped())
    assert len(made.layers) == 1
    with axrt.initialize(made, config=configured(MICROBATCHES)) as engine:
        found = engine.eval_batch(iter(batches(1))).loss
    with torch.no_grad():
        each = [functional.cross_entropy(layer(inputs), target) for inputs, target in batches(1)]
    assert found == pytest.approx(torch.stack(each).mean().item(), rel=1e-6), "nothing dropped"
    assert made.loss_fn.training  # type: ignore[attr-defined]


def test_a_last_stage_without_layers_is_refused() -> None:
    def rank_main(transport: Transport) -> None:
        config = configured(MICROBATCHES, parallel={"partition": [0, 5, 5]})
        axrt.initialize(model(), config=config, transport=transport)

    with pytest.raises(axrt.ConfigError, match="leave the last stage without a layer, and the los"):
        LocalWorld(2).run(rank_main)
