"""A model of layers that sleep, for `model.factory`: 10 ms a rank and microbatch for forward, input
gradient and weight gradient each.

Its layers leave the cores alone, so that many ranks fit few; `model.dropout` stands for the sigma
of a lognormal factor on every sleep.
"""

from math import exp
from random import Random
from time import sleep
from typing import Any

import torch
from torch import Tensor, nn

import axrt
from axrt import Config

RANK_S, RANKS, LAYERS = 0.010, 8, 16
SHAPE = (128, 128)  # 64 KiB


def model(config: Config) -> axrt.PipelineModule:
    """As many layers as eight ranks have chunks at most."""
    layers = [
        axrt.LayerSpec(Sleeper, RANK_S * RANKS / LAYERS, config.model.dropout, place)
        for place in range(LAYERS)
    ]
    return axrt.PipelineModule(layers, lambda outputs, target: outputs.mean())


class Sleeper(nn.Module):
    """One layer, whose weight gradient may wait."""

    def __init__(self, seconds: float, jitter: float, place: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8))
        self._seconds, self._jitter, self._random = seconds, jitter, Random(place)

    def forward(self, value: Tensor) -> Tensor:
        value = value if value.is_floating_point() else torch.zeros(SHAPE)
        return _Sleep.apply(value, self.weight, self)  # type: ignore[no-any-return, no-untyped-call]

    def weight_gradient(self) -> Tensor:
        """What a W computes."""
        self.sleep()
        return torch.zeros(8)

    def sleep(self) -> None:
        sleep(self._seconds * exp(self._jitter * self._random.gauss(0, 1)))


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, layer: Sleeper) -> Tensor:
        ctx.layer = layer
        layer.sleep()
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.layer.sleep()
        return (
            gradient,
            axrt.defer_weight_gradient(ctx.layer.weight, ctx.layer.weight_gradient),
            None,
        )
