"""Worlds that vary as real ones do: uneven stages, messages that take their time, short weight
gradients, a slow rank, microbatches of different lengths.

axrt's `adaptive` follows a plan from the world's costs (`schedule.costs`), as `axrt profile` would
have measured them, with the sigma of its lengths, which `--like` finds. They know neither the slow
rank nor which microbatch is long.
"""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from axrt.scheduler.simulation.cost_table import CostTable, LayerCosts
from axrt.scheduler.simulation.costs import Edge

from . import of_axrt, of_deepspeed
from .arena import in_turn, timed
from .contestant import Contestant
from .late import delay_deepspeed, delay_torch
from .sleeping import RANK_S, Sleeper
from .synthetic import STEPS, microbatch, model, peers, sgd_of_named
from .worlds import WORLDS, World

_MESSAGE_S, _TASK_S = 200e-6, 50e-6  # what a message and a task take besides, docs/performance.md


class Case(NamedTuple):
    """One table: ranks, microbatches a step, name of the world."""

    ranks: int
    microbatches: int
    world: str

    @property
    def label(self) -> str:
        """Short, to choose it by."""
        return f"p{self.ranks}m{self.microbatches}-{self.world}"


def cases() -> list[Case]:
    return [Case(ranks, 2 * ranks, name) for ranks in (4, 8) for name in WORLDS]


def run(case: Case, rounds: int) -> list[dict[str, Any]]:
    """A row a contestant and round, on rank 0; every rank calls it."""
    world, rows = WORLDS[case.world], []
    with tempfile.TemporaryDirectory() as folder:
        contestants = list(_contestants(case, world, Path(folder)))
    if world.delay_s:
        delay_torch(world.delay_s)
        if of_deepspeed.is_installed():
            delay_deepspeed(world.delay_s)
    for number, contestant in in_turn(contestants, rounds):
        steps = STEPS if number else 1  # to warm up
        for layer in contestant.layers:
            layer.begin(world, number, case.microbatches * steps)
        took = timed(contestant.step, steps)
        if number:
            rows.append(_row(case, contestant, number, took.wall_s / steps))
    return rows if dist.get_rank() == 0 else []


def _row(case: Case, contestant: Contestant, number: int, step_s: float) -> dict[str, Any]:
    of = {"runtime": contestant.runtime, "name": contestant.name, "held": contestant.held}
    return {"part": "varied", **case._asdict(), **of, "round": number, "step_s": step_s}


def _contestants(case: Case, world: World, folder: Path) -> Iterator[Contestant]:
    ranks, microbatches = case.ranks, case.microbatches
    chunks = 2 * ranks
    costs = folder / "costs.json"
    costs.write_text(_table(world, chunks).to_json())
    uneven = {"parallel": {"partition": "uniform"}, "optimizer": {"clip": 0.0}}
    plain = {**uneven, "schedule": {"microbatches": microbatches}}
    planned = {"microbatches": microbatches, "costs": os.fspath(costs)}

    def made(name: str, cap: int, settings: dict[str, Any], stages: int = 0) -> Contestant:
        return of_axrt.contestant(
            name,
            lambda of: model(of, ranks),
            microbatch(),
            settings,
            sgd_of_named,
            cap,
            stages,
            world.delay_s,
        )

    for name in ("zb-v", "1f1b"):
        yield made(name, 0, plain)
    for cap in (chunks, chunks + ranks):
        one = made("adaptive", cap, {**uneven, "schedule": planned}, chunks)
        yield one._replace(name=f"adaptive, planned, {cap} held")
    yield from peers(ranks, microbatches, 0.0)


def _table(world: World, layers: int) -> CostTable:
    """The costs of a model of two layers a rank."""
    of = []
    for place in range(layers):
        forward, back, weight = (
            RANK_S * world.stage(kind, place == layers - 1, 2) for kind in "FIW"
        )
        name = Sleeper.__name__
        of.append(LayerCosts(forward, back, weight, 0, 1000, 0.0, 1000, name, 8, pieces=1))
    edge = Edge(world.delay_s + _MESSAGE_S)
    return CostTable({1: tuple(of)}, edge, task_s=_TASK_S, lengths=world.lengths)
