"""What a plan that is made anew may keep: what the schedule before it might."""

from collections.abc import Sequence
from math import inf

from .job import Job
from .longest import Graph, Kept
from .policies import AlongPlan
from .simulator import Costs


def shares_of_room(job: Job, sizes: Sequence[Kept], limit: float = inf) -> list[Kept]:
    """What a microbatch keeps on each stage, as a share of the most that the job lets its rank
    keep.

    A strict plan keeps what its order does. Otherwise a rank may hold so many chunks, the largest
    of its own.

    Args:
        job: a schedule with one pipe.
        sizes: what a microbatch keeps on each stage, in any one unit.
        limit: the most that any rank may keep, in that unit.
    """
    where, policy = job.placement, job.policy
    graph = Graph.of(where, Costs(), job.microbatches, sizes)
    rooms = [
        policy.bounds(where, rank, job.microbatches).held
        * max(sum(sizes[stage]) for stage in where.stages_of(rank))
        for rank in range(job.ranks)
    ]
    if isinstance(policy, AlongPlan) and policy.strict:
        rooms = list(map(graph.most_kept, graph.rows(policy.order)))
    return [
        Kept(*(one / (min(rooms[where.rank_of(stage)], limit) or 1) for one in of))
        for stage, of in enumerate(sizes)
    ]
