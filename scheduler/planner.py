"""An order made for given costs: on every placement that may do, the orders of all policies in that
world and one that is built for it, and then small changes of the best.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from math import floor
from typing import NamedTuple

from .annealing import annealed
from .list_schedule import list_schedule
from .longest import Graph, Row, longest_path
from .order import Order
from .placement import Placement, placement_by_name
from .policies import NAMES, policy_by_name
from .schedules import build_schedule
from .simulator import Costs, order_of

PLACEMENTS = ("linear", "vee")
_TRIED = 2  # of the orders on a placement, the shortest ones are changed
_MOVES = 50  # for each task of a step
_WORK = 30_000_000  # tasks that are looked at in all moves at most: some seconds on one core


class Planned(NamedTuple):
    """A plan.

    Args:
        order: tasks of each rank, weight gradients included.
        takes: duration of a step on these costs where nothing varies.
        begun: name of the policy whose order it began with; "" for one that was built.
    """

    order: Order
    takes: float
    begun: str


class _Begun(NamedTuple):
    takes: float
    rows: list[Row]
    name: str


def planned(
    ranks: int,
    microbatches: int,
    costs: Costs,
    most_held: float,
    placements: Sequence[str] = PLACEMENTS,
    seed: int = 0,
) -> Planned:
    """Plan one step.

    Args:
        ranks: number of ranks of a pipeline.
        microbatches: number of microbatches of a step and replica.
        costs: how long everything takes; what varies is left out.
        most_held: limit on what a rank holds from forwards to weight gradients, in microbatches of
            all its layers.
        placements: names of the placements to choose among, each with one pipe.
        seed: seed of the search. The same seed gives the same plan.
    Raises:
        ValueError: no order holds so little; the text says what is enough.
    """
    found = [
        plan
        for name in placements
        if (plan := _on(placement_by_name(name, ranks, 0), microbatches, costs, most_held, seed))
    ]
    if not found:
        least = min(
            placement.chunks * placement.share
            for placement in (placement_by_name(name, ranks, 0) for name in placements)
        )
        raise ValueError(
            f"most_held = {most_held:g} microbatches is too little for any order on {ranks} ranks; "
            f"expected {least:g} or more"
        )
    return min(found, key=lambda plan: plan.takes)


def _on(
    placement: Placement, microbatches: int, costs: Costs, most_held: float, seed: int
) -> Planned | None:
    """The plan on one placement; None where nothing fits."""
    held = [floor(most_held / placement.share + 1e-9)] * placement.ranks
    if held[0] < placement.chunks:
        return None
    graph = Graph.of(placement, costs, microbatches)
    begun = sorted(_candidates(graph, costs, held), key=lambda one: one.takes)
    moves = min(_MOVES * len(graph.takes), _WORK // len(graph.takes))
    best: Planned | None = None
    for one in begun[:_TRIED]:
        rows, takes = annealed(graph, one.rows, held, moves, seed)
        if best is None or takes < best.takes:
            best = Planned(graph.order(rows), takes, one.name)
    return best


def _candidates(graph: Graph, costs: Costs, held: Sequence[int]) -> Iterator[_Begun]:
    for deepest_first in (True, False):
        with suppress(ValueError):
            rows = list_schedule(graph, held, deepest_first=deepest_first)
            yield _Begun(longest_path(graph, rows).takes, rows, "")
    steady = replace(costs, pieces=1, jitter=0.0, lengths=0.0, hiccups=(0.0, 1.0))
    for name in NAMES:
        if graph.placement.name not in policy_by_name(name).placements:
            continue
        with suppress(ValueError, RuntimeError):
            job = build_schedule(
                name,
                graph.placement.ranks,
                graph.microbatches,
                placement=graph.placement.name,
                chunks=graph.placement.chunks if graph.placement.name == "looped" else 0,
            )
            order = order_of(job, steady)
            if order.splits and all(
                needs <= most for needs, most in zip(order.needs, held, strict=True)
            ):
                rows = graph.rows(order)
                yield _Begun(longest_path(graph, rows).takes, rows, name)
