"""`adaptive` where costs are known: which plan it follows, and how loosely."""

# Candidates are plans made for these costs and the orders of all policies. Each is followed
# strictly, and as a plan: weight gradients go wherever there is time, and tasks may run ahead as
# far as there is room. All of them are simulated in the world that is to come, with what varies in
# it.

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from statistics import median
from typing import NamedTuple

from ..job import Job
from ..order import Order
from ..policies import AlongPlan
from ..simulation.simulator import simulate
from .longest import SLACK, Graph, longest_path
from .planner import Effort, World, check_limit, orders, plans

_LAST = 4  # so many are simulated with all seeds


class Trial(NamedTuple):
    """How candidates are tried."""

    steps: int = 8  # number of steps that are simulated
    seeds: int = 3  # number of seeds of what varies
    orders: int = 100  # number of orders on a placement, the shortest ones


_THOROUGH = Trial()


# `adaptive` follows an order, and no rule is new. Which order, and with how much slack, is tried in
# the simulator in the world that is to come. So no proof was needed, and jitter counts.
def job_along_plan(
    among: Sequence[World],
    microbatches: int,
    limit: float,
    of: Callable[[Job], Job] = lambda job: job,
    seed: int = 0,
    effort: Effort = Effort(),  # noqa: B008
    trial: Trial = _THOROUGH,
) -> Job:
    """The schedule of `adaptive` on known costs. The same seed gives the same one.

    Args:
        limit: the most that a rank may keep, in the unit of `World.kept`.
        of: function that gives a schedule what else the run will have, such as votes; it raises
            `ValueError` where the two do not go together.
        effort: how long the search for a plan may take.
    Returns:
        A job of one replica.
    Raises:
        ValueError: no order keeps so little, and the text says what is enough; or none goes with
            what else the run will have.
    """
    check_limit(among, limit)
    found = [
        (job, world)
        for world in among
        for job in _possible(_candidates(world, microbatches, limit, seed, effort, trial), of)
    ]
    if not found:
        raise ValueError("no order goes with what else the run has; expected another policy")
    varies = any(
        of.jitter or of.lengths or of.hiccups[0] for of in (world.costs for world in among)
    )
    found.sort(key=lambda one: takes(one[0], one[1], trial.steps, [seed]))
    if varies:
        seeds = range(seed, seed + trial.seeds)
        found = sorted(found[:_LAST], key=lambda one: takes(one[0], one[1], trial.steps, seeds))
    return found[0][0]


def _possible(jobs: Iterable[Job], of: Callable[[Job], Job]) -> Iterator[Job]:
    """The schedules with what else the run will have, without those that do not go with it."""
    for job in jobs:
        try:
            possible = of(job)
        except ValueError:
            continue
        yield possible


def takes(job: Job, world: World, steps: int, seeds: Sequence[int]) -> float:
    """The duration of some steps of a schedule in a world: the median over seeds of what varies."""
    return median(
        simulate(job, replace(world.costs, seed=seed), steps=steps).makespan for seed in seeds
    )


def _candidates(
    world: World, microbatches: int, limit: float, seed: int, effort: Effort, trial: Trial
) -> Iterator[Job]:
    if world.least > limit + SLACK:
        return
    graph, steps = world.graph(microbatches), trial.steps
    made = [plan.order for plan in plans([world], microbatches, limit, steps, seed, effort)]
    known = [order for _, order in orders(world.placement, world.costs, microbatches)]
    found = sorted(
        dict.fromkeys([*made, *known]),
        key=lambda order: longest_path(graph, graph.rows(order), steps).takes,
    )
    ways = (list(_ways(graph, order, limit)) for order in found)
    for policies in islice(filter(None, ways), trial.orders):
        yield from (Job(world.placement, policy, microbatches) for policy in policies)


def _ways(graph: Graph, order: Order, limit: float) -> Iterator[AlongPlan]:
    """To follow an order, strictly or as a plan, within the limit."""
    if max(map(graph.most_kept, graph.rows(order))) <= limit + SLACK:
        yield AlongPlan(order, order.needs)
    caps = graph.caps(limit)
    if all(needs <= cap for needs, cap in zip(order.needs, caps, strict=True)):
        yield AlongPlan(order, order.needs, min(caps), strict=False)
