"""A bound that no schedule can beat: every rank waits for its first activation, does its work, and
other ranks wait for its last gradient."""

from itertools import pairwise

from ..placement import Placement
from .costs import Costs, Work


def least_makespan(placement: Placement, costs: Costs, microbatches: int, steps: int = 1) -> float:
    """A lower bound on the duration of some steps under any policy, on a steady machine.

    For each rank it adds the way of the first activation to the rank, all its work, and then the
    larger of two: nothing more than its weight gradients, or, weight gradients aside, the way of
    its last input gradient to the first stage.

    Args:
        costs: durations; jitter and hiccups do not count.
    """
    bounds = []
    for rank in range(placement.ranks):
        mine = [(stage, placement.pipe_of(rank, stage)) for stage in placement.stages_of(rank)]
        share = microbatches * steps / placement.pipes
        arrival = min(_way(placement, costs, stage, pipe, forward=True) for stage, pipe in mine)
        departure = min(_way(placement, costs, stage, pipe, forward=False) for stage, pipe in mine)
        work = [_on(placement, costs, stage, pipe) for stage, pipe in mine]
        again = [
            costs.recomputed.get(stage, 0.0) * of.forward
            for (stage, _), of in zip(mine, work, strict=True)
        ]
        critical = share * (sum(of.forward + of.input for of in work) + sum(again))
        bounds.append(arrival + critical + max(share * sum(of.weight for of in work), departure))
    return max(bounds)


def _way(placement: Placement, costs: Costs, stage: int, pipe: int, forward: bool) -> float:
    """The duration of the way of the first activation to a stage, or of its last input gradient to
    the first stage."""
    work = [_on(placement, costs, one, pipe) for one in range(stage)]
    ranks = [placement.rank_of(one, pipe) for one in range(stage + 1)]
    ends = [one if forward else one[::-1] for one in pairwise(ranks) if one[0] != one[1]]
    links = [costs.link(*one).latency for one in ends]
    return sum(of.forward if forward else of.input for of in work) + sum(links)


def _on(placement: Placement, costs: Costs, stage: int, pipe: int) -> Work:
    """The cost of a microbatch on a stage of the first replica, stragglers included."""
    slow = costs.stragglers.get(placement.rank_of(stage, pipe), 1.0)
    forward, back, weight, sent = costs.of_stage(placement, stage)
    return Work(slow * forward, slow * back, slow * weight, sent)
