"""Costs of a simulation that a file has, see `axrt profile`."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import click

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


def world_on(placement: Placement, table: CostTable, options: dict[str, Any]) -> World:
    """The costs of the table's model, cut so that ranks take equally long.

    Args:
        options: options of the command; those that the table has are not taken.
    Raises:
        ValueError: the model has fewer layers than stages, or an option says what the table says,
            or rests on what it leaves out.
    """
    for name in ("latency", "transfer", "task_cost", "pieces"):
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
    layers = table.layers[samples_of(table, options)]
    cuts = cuts_on(placement, layers)
    known = ModelCosts(layers, table.edge, table.task_s, table.edges, table.lengths)
    world = world_of(placement, cuts, known)
    asked = {name: options[name] for name in ("jitter", "lengths") if options[name] is not None}
    costs = replace(world.costs, **asked)
    return world._replace(costs=costs.on(options["cluster"]) if options["cluster"] else costs)


def _said(name: str) -> str:
    return f"--{name}" if name == "latency" else f"world.{name}"


def cuts_on(placement: Placement, layers: Sequence[LayerCosts]) -> list[int]:
    """The layers at which stages begin, and their number, so that ranks take equally long."""
    seconds = [layer.forward_s + layer.input_s + layer.weight_s for layer in layers]
    return evened(seconds, balanced(seconds, placement.stages), placement.held)


def samples_of(table: CostTable, options: dict[str, Any]) -> int:
    """The samples of a microbatch whose costs are taken; raises `ValueError` where the table has
    none of those that are asked for."""
    samples: int = options["samples"] or min(table.of_degree(1))
    if samples not in table.layers:
        sizes = ", ".join(map(str, sorted(table.layers)))
        raise ValueError(
            f"world.samples = {samples}: the table has costs of microbatches of {sizes} samples; "
            "expected one of them"
        )
    return samples
