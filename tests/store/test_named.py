"""Optimizers and schedules by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer as TorchOptimizer

from axrt.config import Optimizer
from axrt.store import eager_optimizers
from axrt.store.presets import lr_schedule, optimizer_factory
from axrt.store.probe import probed

OF_TORCH = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.8, 0.6, 0.4]),
        (
            "cosine",
            [0.5, 1.0, 1.0, 0.2 + 0.8 * (1 + 2**-0.5) / 2, 0.6, 0.2 + 0.8 * (1 - 2**-0.5) / 2],
        ),
    ],
)
def test_the_rate_rises_then_follows_its_schedule(schedule: str, expected: list[float]) -> None:
    factor = lr_schedule(Optimizer(schedule=schedule, warmup_steps=2, final_lr=0.2), steps=6)
    assert [factor(step) for step in range(6)] == pytest.approx(expected)


@pytest.mark.parametrize(("name", "kind"), OF_TORCH.items())
def test_matrices_decay_and_vectors_do_not(name: str, kind: type[TorchOptimizer]) -> None:
    layer = nn.Linear(3, 3)
    optimizer = optimizer_factory(Optimizer(name=name, weight_decay=0.3))(
        list(layer.named_parameters())
    )
    assert isinstance(optimizer, kind)
    assert [
        (group["params"][0].dim(), group["weight_decay"]) for group in optimizer.param_groups
    ] == [(2, 0.3), (1, 0.0)]


@pytest.mark.parametrize("name", OF_TORCH)
def test_one_by_name_counts_as_torchs_own(name: str) -> None:
    known = probed(
        optimizer_factory(Optimizer(name=name)), list(nn.Linear(3, 3).named_parameters())
    )
    assert known.elementwise


@pytest.mark.parametrize("kind", OF_TORCH.values())
def test_one_by_name_does_what_torchs_own_does_to_the_bit(kind: type[TorchOptimizer]) -> None:
    mine, torchs = (stepped(of) for of in (getattr(eager_optimizers, kind.__name__), kind))
    torch.testing.assert_close(mine, torchs, rtol=0, atol=0)


def stepped(kind: Callable[..., TorchOptimizer]) -> list[Any]:
    """Weights and state after steps of an optimizer, and of one that goes on with its state."""
    weights = nn.Parameter(torch.linspace(-1, 1, 12).reshape(3, 4))
    before, after = (kind([weights], lr=0.1) for _ in range(2))
    seen = list[TorchOptimizer]()
    before.register_step_post_hook(lambda of, *_: seen.append(of))
    for optimizer in (before, after):
        if seen:
            optimizer.load_state_dict(before.state_dict())
        for number in range(3):
            weights.grad = torch.full((3, 4), number - 1.5)
            optimizer.step()
            optimizer.zero_grad()
            assert weights.grad is None
    assert seen == [before] * 3
    return [weights.detach(), after.state_dict()]
