"""What no schedule can beat: every rank waits for its first activation, does its work, and others wait for its last gradient."""

from itertools import pairwise

from .placement import Placement
from .simulator import Costs


def least_makespan(placement: Placement, costs: Costs, microbatches: int, steps: int = 1) -> float:
    """A lower bound on the time of so many steps under any policy, on a steady machine.

    For each rank: the way of the first activation to it, all its work, and then either nothing (weight gradients may end it), or, weight
    gradients aside, the way of its last input gradient to the first stage.
    """
    latency = costs.edge.latency
    work = [costs.of_stage(placement, stage) for stage in range(placement.stages)]
    bounds = []
    for rank in range(placement.ranks):
        mine = [(stage, placement.pipe_of(rank, stage)) for stage in placement.stages_of(rank)]
        share = microbatches * steps / placement.pipes
        arrival = min(sum(one.forward for one in work[:stage]) + latency * _hops(placement, stage, pipe) for stage, pipe in mine)
        departure = min(sum(one.input for one in work[:stage]) + latency * _hops(placement, stage, pipe) for stage, pipe in mine)
        again = [costs.recomputed.get(stage, 0.0) * work[stage].forward for stage, _ in mine]
        critical = share * (sum(work[stage].forward + work[stage].input for stage, _ in mine) + sum(again))
        weights = share * sum(work[stage].weight for stage, _ in mine)
        bounds.append(arrival + max(critical + weights, critical + departure))
    return max(bounds)


def _hops(placement: Placement, stage: int, pipe: int) -> int:
    """How often a microbatch changes ranks on its way to a stage."""
    ranks = [placement.rank_of(one, pipe) for one in range(stage + 1)]
    return sum(one != after for one, after in pairwise(ranks))
