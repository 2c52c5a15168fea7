"""An order made for given costs: on every placement that may do, the orders of all policies in that
world and some that are built for it, and then small changes of the best.
"""

# Why not compiled. mypyc (mypy 2.4.1, gcc -O2) was tried on the pure part. It ends in a fault of
# its own on fit.py and on the protocol of policies, and what it makes of task.py, message.py and
# placement.py does not import: enums with columns, frozen classes that inherit. The twelve files
# of the state, the simulator and the planner compile, with two exceptions moved out. On 8 ranks
# with 16 microbatches a plan then took 2.04 s of CPU in place of 3.74 (medians of three), 1.8
# times as fast; simulated steps of 16 ranks 1.7 (zb-v) and 1.9 times (1f1b), with the same
# figures. A task of an engine on one rank, with empty layers, took 40.4, 48.6 and 30.0 us of CPU
# with the state compiled, and 40.5, 43.2 and 34.2 without (gpipe, 1f1b, zb-v; medians of five,
# interleaved, other work beside). Under twice, that is not worth a compiler in every install and
# files bent to its rules.

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from ..order import Order
from ..placement import Placement, placement_by_name
from ..policies import NAMES, policy_by_name
from ..simulation.bound import least_makespan
from ..simulation.costs import Costs
from ..simulation.schedules import build_schedule, caps_of
from ..simulation.simulator import order_of
from .annealing import annealed
from .delayed import delayed
from .list_schedule import list_schedule
from .longest import SLACK, Graph, Kept, Row, longest_path

PLACEMENTS = ("linear", "vee", "looped")
_TRIED = 2  # of the orders on a placement, the shortest ones are changed
_NEAR = 1.15  # of the shortest order, the best one of a placement that is worth changes


class World(NamedTuple):
    """Where a plan is to do well."""

    placement: Placement  # placement of the stages, with one pipe
    costs: Costs  # how long everything takes; a plan leaves out what varies
    # what a microbatch keeps on each stage; None: its share of a rank's layers, until the
    # weight gradient
    kept: tuple[Kept, ...] | None = None

    def graph(self, microbatches: int) -> Graph:
        """The tasks of a step."""
        return Graph.of(self.placement, self.costs, microbatches, self.kept)

    @property
    def least(self) -> float:
        """What some rank keeps under any order: one microbatch on all its stages."""
        keeps = self.graph(1).keeps
        stages = map(self.placement.stages_of, range(self.placement.ranks))
        return max(sum(keeps[3 * stage] for stage in of) for of in stages)


class Effort(NamedTuple):
    """How long a search may take."""

    moves: int = 200  # number of changes that are tried for each task of a step
    # number of tasks that are looked at in all changes of an order at most; thirty million take
    # some seconds on one core
    work: int = 30_000_000


class Planned(NamedTuple):
    """A plan."""

    order: Order  # tasks of each rank, weight gradients included
    takes: float  # duration of the steps on these costs where nothing varies
    begun: str  # name of the policy whose order it began with; "" for one that was built


class _Begun(NamedTuple):
    takes: float
    rows: list[Row]
    name: str


_USUAL = Effort()


def worlds(ranks: int, costs: Costs, placements: Iterable[str] = PLACEMENTS) -> list[World]:
    """The same costs on several placements.

    Args:
        placements: their names, each with one pipe.
    """
    return [World(placement_by_name(name, ranks, 0), costs) for name in placements]


def planned(
    among: Sequence[World],
    microbatches: int,
    limit: float,
    steps: int = 1,
    seed: int = 0,
    effort: Effort = _USUAL,
) -> Planned:
    """Plan a step. The same seed gives the same plan.

    Args:
        limit: the most that a rank may keep, in the unit of `World.kept`; where that is None, in
            microbatches of all its layers.
        steps: number of such steps, one after the other, that are to be short.
        effort: how long the search may take.
    Raises:
        ValueError: no order keeps so little; the text says what is enough.
    """
    check_limit(among, limit)
    found = plans(among, microbatches, limit, steps, seed, effort)
    return min(found, key=lambda plan: plan.takes)


def check_limit(among: Sequence[World], limit: float) -> None:
    """Check that some order keeps so little.

    Raises:
        ValueError: none does; the text says what is enough.
    """
    least = min(world.least for world in among)
    if limit + SLACK < least:
        raise ValueError(
            f"a limit of {limit:g} is too little for any order on {among[0].placement.ranks} "
            f"ranks; expected {least:g} or more"
        )


# A long step is planned whole. To plan a short one and repeat its middle was tried: with m = 64 the
# middle of a changed order does not repeat itself, and the orders of policies and those that are
# built were ahead everywhere (217 and 250 at latency 1 with 1.5p held).
def plans(
    among: Sequence[World],
    microbatches: int,
    limit: float,
    steps: int = 1,
    seed: int = 0,
    effort: Effort = _USUAL,
) -> list[Planned]:
    """The best plans of each placement that comes near the best one; arguments as of `planned`."""
    begun = [
        (world, _candidates(world, world.graph(microbatches), limit, steps))
        for world in among
        if world.least <= limit + SLACK
    ]
    shortest = min(of[0].takes for _, of in begun)
    return [
        _changed(world, microbatches, one, limit, steps, seed, effort)
        for world, of in begun
        if of[0].takes <= _NEAR * shortest
        for one in of[:_TRIED]
    ]


def _changed(
    world: World,
    microbatches: int,
    begun: _Begun,
    limit: float,
    steps: int,
    seed: int,
    effort: Effort,
) -> Planned:
    graph = world.graph(microbatches)
    size = len(graph.takes)
    tries = min(effort.moves * size, effort.work // (size * min(steps, 2)))
    least = least_makespan(world.placement, world.costs, microbatches, steps)
    rows, takes = annealed(graph, begun.rows, limit, tries, seed, steps, least)
    return Planned(graph.order(rows), takes, begun.name)


def _candidates(world: World, graph: Graph, limit: float, steps: int) -> list[_Begun]:
    """Orders to begin with that keep no more than they may, the shortest first."""
    found = []
    for deepest_first in (True, False):
        with suppress(ValueError):
            found.append(("", list_schedule(graph, limit, deepest_first=deepest_first)))
    found += [("", rows) for rows in delayed(graph, limit)]
    for name, order in orders(world.placement, world.costs, graph.microbatches):
        found.append((name, graph.rows(order)))
    begun = [
        _Begun(longest_path(graph, rows, steps).takes, rows, name)
        for name, rows in found
        if max(map(graph.most_kept, rows)) <= limit + SLACK
    ]
    return sorted(begun, key=lambda one: one.takes)


def orders(placement: Placement, costs: Costs, microbatches: int) -> Iterator[tuple[str, Order]]:
    """The orders of all policies on a placement in a world without what varies, by name; policies
    that take a cap come with several."""
    steady = replace(costs, pieces=1, jitter=0.0, lengths=0.0, hiccups=(0.0, 1.0))
    chunks = placement.chunks if placement.name == "looped" else 0
    fitting = [name for name in NAMES if placement.name in policy_by_name(name).placements]
    for name, cap in ((one, cap) for one in fitting for cap in caps_of(one, placement.ranks)):
        with suppress(ValueError, RuntimeError):
            job = build_schedule(
                name,
                placement.ranks,
                microbatches,
                placement=placement.name,
                chunks=chunks,
                max_held=cap,
            )
            yield name, order_of(job, steady).split()
