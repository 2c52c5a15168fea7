"""Costs of a simulation that a file has, see `axrt profile`."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import click

from axrt.scheduler.job import Job
from axrt.scheduler.numbering import StageJoints
from axrt.scheduler.placement import Placement
from axrt.scheduler.planning.balance import balanced, evened
from axrt.scheduler.planning.planner import World
from axrt.scheduler.plural import plural
from axrt.scheduler.simulation.cost_table import CostTable, LayerCosts
from axrt.scheduler.simulation.model_costs import ModelCosts, world_of


class CostsOrFile(click.ParamType):  # type: ignore[type-arg]
    """Numbers, as another type takes them, or the name of a file that ends with .json."""

    def __init__(self, numbers: click.ParamType) -> None:  # type: ignore[type-arg]
        self._numbers = numbers
        self.name = f"{numbers.name}|FILE.json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not str(value).endswith(".json"):
            try:
                return self._numbers.convert(value, param, ctx)
            except click.BadParameter as error:
                self.fail(f"{error.message}; or a file whose name ends with .json", param, ctx)
        try:
            return CostTable.read(Path(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


def world_on(
    placement: Placement, table: CostTable, options: dict[str, Any], waits: bool = False
) -> World:
    """The costs of the table's model, cut so that ranks take equally long.

    Args:
        options: options of the command; those that the table has are not taken.
        waits: of a team one member is meant, which waits at joints.
    Raises:
        ValueError: the model has fewer layers than stages, or an option says what the table says,
            or rests on what it leaves out.
    """
    for name in ("latency", "transfer", "task_cost", "pieces", "joints", "exchange"):
        if options[name]:
            raise ValueError(
                f"{_said(name)} and --costs with a file, which says that; expected one of them"
            )
    for name in ("node", "reduce_transfer"):
        if options[name] and table.edge.bandwidth == inf and not options["cluster"]:
            raise ValueError(
                f"world.{name} counts on the bandwidth of links, which the table does not limit; "
                "expected one of a job of two ranks or more: mpirun -n 2 axrt profile"
            )
    if table.num_layers < placement.stages:
        raise ValueError(
            f"the table has {plural(table.num_layers, 'layer')}, which cannot fill "
            f"{plural(placement.stages, 'stage')}"
        )
    known = known_costs(table, options)
    known = known.waiting() if waits else known
    world = world_of(placement, cuts_on(placement, known.layers), known)
    asked = {name: options[name] for name in ("jitter", "lengths") if options[name] is not None}
    costs = replace(world.costs, **asked)
    return world._replace(costs=costs.on(options["cluster"]) if options["cluster"] else costs)


def _said(name: str) -> str:
    return f"--{name}" if name in ("latency", "joints", "exchange") else f"world.{name}"


def known_costs(table: CostTable, options: dict[str, Any]) -> ModelCosts:
    """The costs of a member's layers; slices of a team take the link of the table.

    Raises:
        ValueError: the table has no such teams or microbatches.
    """
    team = options["tensor"]
    layers = table.of_degree(team)[samples_of(table, options)]
    links = table.edge, table.task_s, table.edges, table.lengths
    return ModelCosts(layers, *links, team, within=table.edge)


def in_layers(job: Job, known: ModelCosts) -> Job:
    """A job of the table's layers, with the joints of a team."""
    cuts = cuts_on(job.placement, known.layers)
    joints = {
        stage: StageJoints(
            sum(len(of.joints) for of in known.layers[first:end]),
            sum(len(of.back_joints) for of in known.layers[first:end]),
        )
        for stage, (first, end) in enumerate(pairwise(cuts))
    }
    joints = {stage: of for stage, of in joints.items() if any(of) and known.team > 1}
    return replace(job, cuts=tuple(cuts), team=known.team, joints=joints)


def cuts_on(placement: Placement, layers: Sequence[LayerCosts]) -> list[int]:
    """The layers at which stages begin, and their number, so that ranks take equally long."""
    seconds = [layer.forward_s + layer.input_s + layer.weight_s for layer in layers]
    return evened(seconds, balanced(seconds, placement.stages), placement.held)


def samples_of(table: CostTable, options: dict[str, Any]) -> int:
    """The samples of a microbatch whose costs are taken; raises `ValueError` where the table has
    none of those that are asked for."""
    of_degree = table.of_degree(options["tensor"])
    samples: int = options["samples"] or min(of_degree)
    if samples not in of_degree:
        sizes = ", ".join(map(str, sorted(of_degree)))
        raise ValueError(
            f"world.samples = {samples}: the table has costs of microbatches of {sizes} samples; "
            "expected one of them"
        )
    return samples
