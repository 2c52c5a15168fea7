"""A job of teams with few joints and members, for simulations: all those of a model of many layers
would take minutes."""

# Members are alike, so two stand for more. Pieces between joints are merged until a task has a few,
# and an exchange takes as much longer, and a piece as much as the loop takes for those in it.

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from axrt.scheduler.job import Job
from axrt.scheduler.numbering import StageJoints
from axrt.scheduler.simulation.cost_table import LayerCosts
from axrt.scheduler.simulation.model_costs import ModelCosts

_JOINTS = 8  # of a forward or backward at most
_MEMBERS = 2


def with_few_joints(job: Job, costs: ModelCosts) -> tuple[Job, ModelCosts]:
    """A job of which a step takes as long, and its costs."""
    team = min(job.team, _MEMBERS)
    few = replace(job, team=team, joints={stage: _few(of) for stage, of in job.joints.items()})
    layers = list(_layers(job, few, costs))
    return few, costs._replace(layers=layers, team=team)


def exchanges_of(job: Job, costs: ModelCosts) -> tuple[float, ...]:
    """Seconds that a member's slices take to others at a joint of each stage."""
    return tuple(
        _exchanged_s(costs, costs.layers[first:end]) / max(1, sum(job.joints_of(stage)))
        for stage, (first, end) in enumerate(pairwise(job.cuts))
    )


def _exchanged_s(costs: ModelCosts, layers: Sequence[LayerCosts]) -> float:
    sizes = [size for layer in layers for size in (*layer.joints, *layer.back_joints)]
    return sum(map(costs.within.seconds, sizes))


def _few(of: StageJoints) -> StageJoints:
    return StageJoints(min(of.forward, _JOINTS), min(of.back, _JOINTS))


def _layers(job: Job, few: Job, costs: ModelCosts) -> Iterator[LayerCosts]:
    for stage, (first, end) in enumerate(pairwise(job.cuts)):
        joints, left = job.joints_of(stage), few.joints_of(stage)
        forward_s = costs.task_s * (joints.forward - left.forward) / max(1, end - first)
        back_s = costs.task_s * (joints.back - left.back) / max(1, end - first)
        for layer in costs.layers[first:end]:
            yield replace(
                layer, forward_s=layer.forward_s + forward_s, input_s=layer.input_s + back_s
            )
