"""Layers that sleep: so that many ranks fit few cores, and what counts is the schedule and what a
runtime adds to it. Layers leave the cores alone, runtimes share them: with four ranks a core, CPU
that a runtime takes costs it more than on a core a rank.

Durations are those of a world, see `worlds`. Jitter is drawn as the simulator draws it, from the
same seeds for every runtime: for each kind and stage, so that schedules of two chunks a rank meet
other, shorter ones than those of one.
Every runtime gets the leanest layer that it can schedule: one node of the autograd graph, whose
weight gradient waits (axrt) or comes along (backwards that are whole), or, for torch's split
backward, one node for the input gradient and one for the weight gradient, since that walks the node
where the two meet twice.
"""

import time
from collections.abc import Callable
from math import exp
from random import Random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .worlds import CHUNK_S, WORLDS, World

RANK_S = 2 * CHUNK_S  # a forward, an input gradient and a weight gradient of a rank each
SHAPE = (128, 128)  # 64 KiB
KINDS = "FIW"

Later = Callable[[Tensor, Callable[[], Tensor]], Tensor | None]


class Slept(NamedTuple):
    """When a layer slept, on the node's clock."""

    kind: str
    stage: int
    number: int
    began_s: float
    ended_s: float


def at_once(parameter: Tensor, compute: Callable[[], Tensor]) -> Tensor:
    """A weight gradient that does not wait."""
    return compute()


def drawn_s(
    base_s: float, jitter: float, seed: int, kind: str, stage: int, count: int
) -> list[float]:
    """How long the tasks of a stage take: the draws of `axrt.scheduler.simulation.simulator`."""
    stream, taken = Random(f"{seed} {kind} {stage}"), []
    for _ in range(count):
        taken.append(base_s * exp(jitter * stream.gauss(0, 1)))
        stream.random()
    return taken


class Sleeper(nn.Module):
    """One stage.

    Args:
        stage: its number.
        chunks: stages a rank.
        ranks: of the pipeline.
        later: takes what computes the weight gradient.
        two_nodes: the weight gradient has a node of its own.
    """

    def __init__(
        self,
        stage: int,
        chunks: int,
        ranks: int,
        later: Later = at_once,
        two_nodes: bool = False,
    ) -> None:
        super().__init__()
        self.stage, self.chunks, self.ranks = stage, chunks, ranks
        self.later, self.two_nodes = later, two_nodes
        self.weight = nn.Parameter(torch.zeros(8))
        self.value, self.number = torch.zeros(SHAPE), torch.zeros(())
        self.weight_gradient = torch.zeros(8)
        self.slept: list[Slept] = []
        self.begin(WORLDS["even"], 0, 4096)

    def begin(self, world: World, seed: int, count: int) -> None:
        """From now on so many microbatches, counted from 0, on this rank."""
        self.next = 0
        self.slept.clear()
        is_last = self.stage == self.chunks * self.ranks - 1
        of_rank = world.rank(dist.get_rank() if dist.is_initialized() else 0)
        lengths = world.microbatches(seed, count)
        self.takes_s = {}
        for kind in KINDS:
            base_s = RANK_S * of_rank * world.stage(kind, is_last, self.chunks)
            drawn = drawn_s(base_s, world.jitter, seed, kind, self.stage, count)
            self.takes_s[kind] = [s * of for s, of in zip(drawn, lengths, strict=True)]

    def sleep(self, kind: str, number: int) -> None:
        began_s = time.perf_counter()
        time.sleep(self.takes_s[kind][number])
        self.slept.append(Slept(kind, self.stage, number, began_s, time.perf_counter()))

    def forward(self, x: Tensor) -> Tensor:
        number = self.next
        self.next += 1
        if not self.two_nodes:
            return _Whole.apply(x, self.weight, self, number)  # type: ignore[no-any-return, no-untyped-call]
        met: Tensor = _Through.apply(x, self, number) + _Weight.apply(self.weight, self, number)  # type: ignore[no-untyped-call]
        return met


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: Sleeper, number: int) -> Tensor:
        ctx.layer, ctx.number = layer, number
        layer.sleep("F", number)
        return layer.value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        layer, number = ctx.layer, ctx.number
        layer.sleep("I", number)

        def weight_gradient() -> Tensor:
            layer.sleep("W", number)
            return layer.weight_gradient  # type: ignore[no-any-return]

        weight = layer.later(layer.weight, weight_gradient)
        return layer.value.clone(), weight, None, None


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Sleeper, number: int) -> Tensor:
        ctx.layer, ctx.number = layer, number
        layer.sleep("F", number)
        return layer.value.detach()  # what `_Weight` adds makes a tensor of its own

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.layer.sleep("I", ctx.number)
        return gradient.clone(), None, None


class _Weight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, layer: Sleeper, number: int) -> Tensor:
        ctx.layer, ctx.number = layer, number
        return layer.number.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.layer.sleep("W", ctx.number)
        return ctx.layer.weight_gradient, None, None


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Tensor) -> Tensor:
        ctx.shape = outputs.shape
        return outputs.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.zeros(ctx.shape)


def loss_fn(outputs: Tensor, target: Tensor) -> Tensor:
    """Always 0."""
    return _Loss.apply(outputs)  # type: ignore[no-any-return, no-untyped-call]
