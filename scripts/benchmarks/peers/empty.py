"""Microseconds a task where layers do nothing, on two ranks: what a runtime costs while its code is
in the caches.

A split backward counts as two tasks, though its second half has nothing to do here: compare whole
with whole and split with split.
"""

from collections.abc import Iterator
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import axrt

from . import of_axrt, of_torch
from .arena import in_turn, timed
from .contestant import Contestant
from .sleeping import loss_fn

SHAPE, MICROBATCHES, STEPS = (64, 64), 256, 4  # 16 KiB


class Nothing(nn.Module):
    """Hands on what it gets.

    Args:
        copies: as a tensor of its own; torch's split backward wants that.
        weight: has a weight, which it does not use; a model of axrt must have one.
    """

    def __init__(self, copies: bool = False, weight: bool = False) -> None:
        super().__init__()
        self.copies = copies
        if weight:
            self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x.clone() if self.copies else x.view_as(x)


def run(rounds: int) -> list[dict[str, Any]]:
    """A row a contestant and round, on rank 0; every rank calls it."""
    rows = []
    for number, contestant in in_turn(list(_contestants()), rounds):
        took = timed(contestant.step, STEPS if number else 1)
        row = {
            "part": "empty",
            "runtime": contestant.runtime,
            "name": contestant.name,
            "round": number,
        }
        rows.append(row | {"us_per_task": 1e6 * took.wall_s / STEPS / contestant.tasks})
    return [row for row in rows if row["round"]] if dist.get_rank() == 0 else []


def _contestants() -> Iterator[Contestant]:
    one = repeat((torch.zeros(SHAPE, requires_grad=True), torch.zeros(1)))
    whole = repeat(
        (
            torch.zeros(MICROBATCHES * SHAPE[0], SHAPE[1], requires_grad=True),
            torch.zeros(MICROBATCHES),
        )
    )
    for name in ("gpipe", "1f1b", "adaptive"):
        yield of_axrt.contestant(name, _model, one, {"schedule": {"microbatches": MICROBATCHES}})
    for name in of_torch.NAMES:
        modules = lambda stage, chunks, copies=name in of_torch.SPLITS: Nothing(copies)  # noqa: E731
        yield of_torch.contestant(name, modules, _examples, loss_fn, whole, MICROBATCHES, None)


def _model(stages: int) -> axrt.PipelineModule:
    return axrt.PipelineModule([Nothing(weight=True) for _ in range(stages)], loss_fn)


def _examples(stage: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(SHAPE, requires_grad=True), torch.zeros(SHAPE, requires_grad=True)
