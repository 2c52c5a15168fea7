"""Two replicas of two stages of which one rank is slow, or whose microbatches differ in length.

axrt shares microbatches or deals them out, and stands beside the data parallelism of torch and of
DeepSpeed.

Layers sleep. How long, in shares of the usual, stands in the first element of a microbatch, so it
is the same on both stages and goes along with the microbatch to whoever computes it.
"""

import time
from collections.abc import Iterator
from math import exp
from random import Random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

import axrt
from axrt.transport.mpi import MpiTransport

from . import of_deepspeed
from .arena import in_turn, timed
from .contestant import Contestant
from .sleeping import loss_fn

STAGES, REPLICAS = 2, 2
MICROBATCHES, STEPS = 16, 4
FORWARD_S, BACKWARD_S = 0.005, 0.010
SHAPE = (16, 16)


class Case(NamedTuple):
    """What is uneven: the factor of rank 0, and sigma of the factor of a microbatch."""

    name: str
    slow: float = 1.0
    lengths: float = 0.0


CASES = (Case("even"), Case("rank 0 takes 1.3", slow=1.3), Case("lengths of sigma 0.5", 1.0, 0.5))


class Course:
    """What all contestants train on.

    Attributes:
        slow: factor of rank 0.
    """

    def __init__(self) -> None:
        self.slow, self._sigma, self._random = 1.0, 0.0, Random(0)

    def begin(self, case: Case, seed: int) -> None:
        self.slow, self._sigma, self._random = case.slow, case.lengths, Random(seed)

    def step(self) -> list[list[Tensor]]:
        """The microbatches of the next step, by replica; every rank draws all."""
        return [[self._microbatch() for _ in range(MICROBATCHES)] for _ in range(REPLICAS)]

    def _microbatch(self) -> Tensor:
        value = torch.zeros(SHAPE)
        value[0, 0] = exp(self._sigma * self._random.gauss(0, 1))
        return value.requires_grad_()


class Sleeper(nn.Module):
    """A stage."""

    def __init__(self, course: Course) -> None:
        super().__init__()
        self.course, self.weight = course, nn.Parameter(torch.zeros(8))

    def sleep(self, seconds: float, length: float) -> None:
        time.sleep(seconds * length * (self.course.slow if dist.get_rank() == 0 else 1.0))

    def forward(self, value: Tensor) -> Tensor:
        return _Slept.apply(value, self.weight, self)  # type: ignore[no-any-return, no-untyped-call]


class _Slept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, layer: Sleeper) -> Tensor:
        ctx.layer, ctx.length, ctx.shape = layer, float(value[0, 0]), weight.shape
        layer.sleep(FORWARD_S, ctx.length)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.layer.sleep(BACKWARD_S, ctx.length)
        return gradient, torch.zeros(ctx.shape), None


def run(rounds: int) -> list[dict[str, Any]]:
    """A row a contestant, case and round, on rank 0; every rank calls it."""
    rows: list[dict[str, Any]] = []
    course = Course()
    for number, contestant in in_turn(list(_contestants(course)), rounds):
        for case in CASES if number else CASES[:1]:
            course.begin(case, number)
            took = timed(contestant.step, STEPS if number else 1)
            if number:
                of = {"runtime": contestant.runtime, "name": contestant.name, "round": number}
                rows.append({"part": "sharing", "case": case.name, **of, "s": took.wall_s / STEPS})
    return rows if dist.get_rank() == 0 else []


def _contestants(course: Course) -> Iterator[Contestant]:
    yield _axrt(course, "1f1b, dealt out", share=False)
    yield _axrt(course, "1f1b, shared", share=True)
    yield _torch(course)
    if of_deepspeed.is_installed():
        yield _deepspeed(course)


def _axrt(course: Course, name: str, share: bool) -> Contestant:
    layers = [Sleeper(course) for _ in range(STAGES)]
    engine = axrt.initialize(
        axrt.PipelineModule(layers, loss_fn),
        lambda named: torch.optim.SGD([one for _, one in named], lr=0.0),
        config={
            "schedule": {"policy": "1f1b", "microbatches": MICROBATCHES, "share": share},
            "parallel": {"data": REPLICAS, "partition": "uniform"},
            "run": {"device": "cpu"},
        },
        transport=MpiTransport(MPI.COMM_WORLD),
    )

    def step() -> None:
        mine = course.step()[engine.data_rank]
        engine.train_batch(iter([(value, torch.zeros(1)) for value in mine]))

    return Contestant(name, "axrt", step, 0)


def _torch(course: Course) -> Contestant:
    """Its 1F1B in each replica, and an all-reduce of the gradients, as its guides compose them."""
    rank = dist.get_rank()
    replica, stage = divmod(rank, STAGES)
    pipes = [dist.new_group(list(range(of * STAGES, (of + 1) * STAGES))) for of in range(REPLICAS)]
    copies = [dist.new_group(list(range(of, REPLICAS * STAGES, STAGES))) for of in range(STAGES)]
    layer, example = Sleeper(course), torch.zeros(SHAPE, requires_grad=True)
    pipeline = schedules.Schedule1F1B(
        PipelineStage(
            layer,
            stage,
            STAGES,
            torch.device("cpu"),
            input_args=(example,),
            output_args=(example,),
            group=pipes[replica],
        ),
        MICROBATCHES,
        loss_fn=loss_fn,
    )
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)

    def step() -> None:
        inputs = torch.cat([value.detach() for value in course.step()[replica]]).requires_grad_()
        if stage == 0:
            pipeline.step(inputs, return_outputs=False)
        else:
            pipeline.step(target=torch.zeros(MICROBATCHES), losses=[], return_outputs=False)
        dist.all_reduce(layer.weight.grad, group=copies[stage])
        optimizer.step()
        optimizer.zero_grad()

    return Contestant("1F1B and all-reduce", "torch", step, 0)


def _deepspeed(course: Course) -> Contestant:
    items: list[tuple[Tensor, Tensor]] = []

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield items.pop(0)

    replica = dist.get_rank() % REPLICAS  # ranks of a stage come one after the other
    layers = [Sleeper(course) for _ in range(STAGES)]
    made = of_deepspeed.contestant(
        layers,
        loss_fn,
        batches(),
        MICROBATCHES,
        1,
        lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        stages=STAGES,
    )

    def step() -> None:
        items[:] = [(value, torch.zeros(1)) for value in course.step()[replica]]
        made.step()

    return made._replace(step=step)
