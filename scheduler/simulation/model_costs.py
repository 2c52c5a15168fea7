"""The costs of a model and its links, and what they come to on a placement: those of its stages."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from ..placement import Placement
from ..planning.longest import Kept
from ..planning.planner import World
from .cost_table import LayerCosts
from .costs import Costs, Edge, Work

TASK_S = 50e-6  # what the loop takes for a task, docs/performance.md
# A plan reckons with a jitter of 0.05 at least, and with the pieces that weight gradients really
# come in. With one piece a stage, an order and the same one with floating weight gradients tie on
# exact times; the floating one loses 1 to 4 % at a jitter of 0.02 to 0.1 (`--table places`). So the
# tie is decided by what all machines have. Other ways to follow an order were tried in the
# simulator: weight gradients ahead of their places after a longer wait, forwards ahead with weight
# gradients in place, and input gradients as well. None is better than both strict and floating
# ones, but for very late messages with much room, where a plan for that latency is as good. `auto`
# and a run without a policy, which compare a plan with policies, stay on the measured jitter. They
# simulate one seed, and foretell steps of over 4p microbatches from shorter ones, where lengths
# count as jitter. Where a plan is under 1 % faster than the row, the row stays.
LEAST_JITTER = 0.05  # that plans reckon with: no machine is quite steady
_MOST_PIECES = 4


class ModelCosts(NamedTuple):
    """Costs of a model; there are layers and edges on the main rank alone."""

    layers: Sequence[LayerCosts]  # cost of each layer
    edge: Edge = Edge()  # link between two ranks, in seconds and bytes
    task_s: float = TASK_S  # seconds that the loop takes for a task
    # links that differ, by (from, to), ranks of a pipeline
    edges: Mapping[tuple[int, int], Edge] = {}
    lengths: float = 0.0  # see `CostTable`
    team: int = 1  # number of members that hold each layer; the layers' costs are those of one
    within: Edge = Edge()  # link between members of a team
    # seconds of the end of a step on each stage: sums over replicas and the optimizer's step; ()
    # where they take none
    step_s: tuple[float, ...] = ()

    def unsteady(self) -> "ModelCosts":
        """The same with `LEAST_JITTER` at least: some ways to follow an order are good on a steady
        machine only."""
        layers = [replace(of, spread=max(LEAST_JITTER, of.spread)) for of in self.layers]
        return self._replace(layers=layers)

    def waiting(self) -> "ModelCosts":
        """The same of one member, which waits at each joint of a task for the slices of others."""
        if self.team == 1:
            return self
        layers = [
            replace(
                of,
                forward_s=of.forward_s + self._waited_s(of.joints),
                input_s=of.input_s + self._waited_s(of.back_joints),
            )
            for of in self.layers
        ]
        return self._replace(layers=layers, team=1)

    def _waited_s(self, joints: Sequence[int]) -> float:
        return sum(self.task_s + self.within.seconds(size) for size in joints)


def world_of(placement: Placement, cuts: Sequence[int], known: ModelCosts) -> World:
    """The costs of a model that is cut for a placement."""
    stages = [known.layers[first:end] for first, end in pairwise(cuts)]
    costs = Costs(
        tuple(work_of(stage, known.team) for stage in stages),
        step_of=known.step_s,
        task=known.task_s,
        edge=known.edge,
        edges=dict(_of_members(known)),
        jitter=median(layer.spread for layer in known.layers),
        lengths=known.lengths,
        pieces=pieces_of([sum(layer.pieces for layer in stage) for stage in stages]),
    )
    return World(placement, costs, tuple(map(kept_by, stages)))


def _of_members(known: ModelCosts) -> Iterator[tuple[tuple[int, int], Edge]]:
    """The links that differ, by places: the members of a team come one after the other."""
    for (source, to), edge in known.edges.items():
        for member in range(known.team):
            yield (source * known.team + member, to * known.team + member), edge


def work_of(layers: Sequence[LayerCosts], team: int = 1) -> Work:
    """The cost of a stage of these layers.

    Args:
        team: number of members that hold them, each of which sends a part of an activation.
    """
    return Work(
        sum(layer.forward_s for layer in layers),
        sum(layer.input_s for layer in layers),
        sum(layer.weight_s for layer in layers),
        team * layers[-1].sent_bytes if layers else 0,
    )


def pieces_of(stages: Sequence[float]) -> int:
    """The pieces of a weight gradient in a simulation, from those of each stage: the median of
    stages that have any. More than a few take long to simulate, and change little."""
    return max(1, min(round(median([one for one in stages if one] or [1])), _MOST_PIECES))


def kept_by(layers: Sequence[LayerCosts]) -> Kept:
    """Bytes that a microbatch keeps on a stage of these layers."""
    until_weight = sum(layer.until_weight_bytes for layer in layers)
    return Kept(sum(layer.stash_bytes for layer in layers) - until_weight, until_weight)
