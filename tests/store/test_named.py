"""Optimizers and schedules by name."""

import pytest
import torch
from torch import nn

from axrt.config import Optimizer
from axrt.store.presets import lr_schedule, optimizer_factory


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


@pytest.mark.parametrize(
    ("name", "kind"),
    [("adamw", torch.optim.AdamW), ("adam", torch.optim.Adam), ("sgd", torch.optim.SGD)],
)
def test_matrices_decay_and_vectors_do_not(name: str, kind: type) -> None:
    layer = nn.Linear(3, 3)
    optimizer = optimizer_factory(Optimizer(name=name, weight_decay=0.3))(
        list(layer.named_parameters())
    )
    assert type(optimizer) is kind
    assert [
        (group["params"][0].dim(), group["weight_decay"]) for group in optimizer.param_groups
    ] == [(2, 0.3), (1, 0.0)]
