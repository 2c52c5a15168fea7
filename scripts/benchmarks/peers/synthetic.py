"""Utilisation with layers that sleep, beside what the simulator says for the same durations."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, repeat
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import axrt
from axrt.scheduler.simulation.costs import Costs, Edge, Work
from axrt.scheduler.simulation.schedules import build_schedule
from axrt.scheduler.simulation.simulator import simulate

from . import of_axrt, of_deepspeed, of_torch
from .arena import Took, in_turn, timed
from .contestant import Contestant
from .sleeping import RANK_S, SHAPE, Sleeper, Slept, at_once, loss_fn
from .worlds import World

STEPS = 8


class Case(NamedTuple):
    """One table: ranks, microbatches a step, sigma of the jitter, steps in a row without a barrier,
    clipping."""

    ranks: int
    microbatches: int
    jitter: float
    steps: int
    clips: bool

    @property
    def label(self) -> str:
        """Short, to choose it by."""
        extras = ("-jitter", self.jitter > 0), ("-clip", self.clips), ("-flush", self.steps == 1)
        return f"p{self.ranks}m{self.microbatches}" + "".join(extra for extra, has in extras if has)


class Loop(NamedTuple):
    """What the loop was measured to cost, in seconds.

    Args:
        task: between two layers of a rank that has work, and what a sleep takes too long.
        message: from the end of a layer to the start of one on another rank that waits for it, less
            `task`.
    """

    task: float
    message: float


def caps(ranks: int) -> tuple[int, int]:
    """The memory of zb-v, and one and a half times that."""
    return 2 * ranks, 3 * ranks


def run(case: Case, rounds: int) -> list[dict[str, Any]]:
    """A row a contestant and round, on rank 0; every rank calls it."""
    rows: list[dict[str, Any]] = []
    turns = 1 if case.steps > 1 else 3
    for number, contestant in in_turn(list(_contestants(case)), rounds):
        for _ in range(turns if number else 1):
            seed = number if case.jitter else 0
            for layer in contestant.layers:
                world = World("jitter", jitter=case.jitter * (number > 0))
                layer.begin(world, seed, case.microbatches * case.steps)
            took = timed(contestant.step, case.steps if number else 1)
            loop = _loop([layer for layer in contestant.layers if layer.slept], contestant.splits)
            if number:
                rows.append(_row(case, contestant, seed, took, loop))
    return rows if dist.get_rank() == 0 else []


def _row(case: Case, contestant: Contestant, seed: int, took: Took, loop: Loop) -> dict[str, Any]:
    ideal_s = 3 * RANK_S * case.microbatches * case.steps
    row = {
        "part": "synthetic",
        **case._asdict(),
        "runtime": contestant.runtime,
        "name": contestant.name,
        "round": seed,
    }
    row |= {
        "utilisation": ideal_s / took.wall_s,
        "cpu": took.cpu_s / took.wall_s / case.ranks,
        "task_us": 1e6 * loop.task,
        "message_us": 1e6 * loop.message,
    }
    if contestant.runtime == "axrt" and dist.get_rank() == 0:
        row |= {
            "simulated": _simulated(case, contestant.name, seed, Loop(0.0, 0.0)),
            "predicted": _simulated(case, contestant.name, seed, loop),
        }
    return row


def _simulated(case: Case, name: str, seed: int, loop: Loop) -> float:
    policy_name, _, held = name.partition(", ")
    job = build_schedule(
        policy_name, case.ranks, case.microbatches, max_held=int(held.split()[0]) if held else 0
    )
    work = Work(RANK_S, RANK_S, RANK_S)
    costs = Costs(
        work=work,
        task=loop.task,
        step=loop.task,
        edge=Edge(loop.message),
        jitter=case.jitter,
        pieces=1,
        seed=seed,
    )
    line = simulate(replace(job, votes=case.clips), costs, steps=case.steps)
    return 3 * RANK_S * case.microbatches * case.steps / line.makespan


def _loop(layers: Sequence[Sleeper], splits: bool) -> Loop:
    """From when layers slept, on all ranks."""
    mine = sorted((one for layer in layers for one in layer.slept), key=lambda one: one.began_s)
    late = [
        one.ended_s - one.began_s - layer.takes_s[one.kind][one.number]
        for layer in layers
        for one in layer.slept
    ]
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, (mine, late))
    spans = [span for span, _ in everyones]
    ends = {slept[:3]: (slept.ended_s, rank) for rank, span in enumerate(spans) for slept in span}
    gaps: list[float] = []
    lags: list[float] = []
    for rank, span in enumerate(spans):
        for before, after in pairwise(span):
            if after.kind == "W" and not splits:
                continue  # in one task with the input gradient
            ended_s, source = ends.get(_needed(after, splits), (0.0, rank))
            (lags if source != rank and ended_s > before.ended_s else gaps).append(
                after.began_s - max(before.ended_s, ended_s)
            )
    if not gaps:
        return Loop(0.0, 0.0)
    gap = statistics.median(gaps)
    overslept = statistics.mean(one for _, each in everyones for one in each)
    return Loop(gap + overslept, max(statistics.median(lags or [gap]) - gap, 0.0))


def _needed(slept: Slept, splits: bool) -> tuple[str, int, int]:
    """What another rank must have done first."""
    kind, stage, number, *_ = slept
    if kind == "F":
        return kind, stage - 1, number
    return ("I" if splits else "W", stage + 1, number) if kind == "I" else ("", 0, 0)


def _contestants(case: Case) -> Iterator[Contestant]:
    ranks, microbatches, clip = case.ranks, case.microbatches, float(case.clips)
    settings = {
        "schedule": {"microbatches": microbatches},
        "optimizer": {"clip": clip},
        "parallel": {"partition": "uniform"},
    }
    for name, cap in (("adaptive", 0), ("adaptive", caps(ranks)[1]), ("zb-v", 0), ("1f1b", 0)):
        yield of_axrt.contestant(
            name, lambda stages: model(stages, ranks), microbatch(), settings, sgd_of_named, cap
        )
    yield from peers(ranks, microbatches, clip)


def model(stages: int, ranks: int) -> axrt.PipelineModule:
    """A layer a stage."""
    layers = [
        Sleeper(stage, stages // ranks, ranks, axrt.defer_weight_gradient)
        for stage in range(stages)
    ]
    return axrt.PipelineModule(layers, loss_fn)


def microbatch() -> Iterator[tuple[Tensor, Tensor]]:
    """The same one for ever."""
    return repeat((torch.zeros(SHAPE, requires_grad=True), torch.zeros(1)))


def peers(ranks: int, microbatches: int, clip: float) -> Iterator[Contestant]:
    """Torch's schedules, and DeepSpeed's where it is installed."""
    rows, width = SHAPE
    whole = torch.zeros(microbatches * rows, width, requires_grad=True)
    for name in of_torch.NAMES:
        yield of_torch.contestant(
            name,
            _torchs(name, ranks),
            _examples,
            loss_fn,
            repeat((whole, torch.zeros(microbatches))),
            microbatches,
            _sgd,
            clip,
        )
    if of_deepspeed.is_installed():
        layers = [Sleeper(stage, 1, ranks) for stage in range(ranks)]
        yield of_deepspeed.contestant(layers, loss_fn, microbatch(), microbatches, 1, _sgd, clip)


def _torchs(name: str, ranks: int) -> Any:
    def made(stage: int, chunks: int) -> Sleeper:
        return Sleeper(stage, chunks, ranks, at_once, name in of_torch.SPLITS)

    return made


def _examples(stage: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(SHAPE, requires_grad=True), torch.zeros(SHAPE, requires_grad=True)


def _sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


def sgd_of_named(named: Any) -> torch.optim.Optimizer:
    """A step that changes nothing."""
    return _sgd([parameter for _, parameter in named])
