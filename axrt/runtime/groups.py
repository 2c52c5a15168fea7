"""The ranks that a library connects: those that hold a bucket, and those with neighbouring
stages."""

# Every rank comes to its groups in the same order, since each comes up when the last of its ranks
# is there.

from collections.abc import Mapping, Sequence

from axrt.scheduler.bucket import Copies
from axrt.scheduler.job import Job
from axrt.scheduler.rules.collectives import groups_of
from axrt.transport.collectives import Group

from .rank import Rank


def groups_on(
    rank: Rank, job: Job, copies: Mapping[int, Sequence[Copies]]
) -> Mapping[tuple[int, int], Group]:
    """The group of each bucket of this rank that the library adds up, by stage and index; every
    rank calls it at the same time.

    Args:
        copies: copies of each bucket of a stage, by stage.
    """
    if not job.by_library:
        return {}
    collectives = rank.transport.collectives(rank.device)
    ranks = {
        which: tuple(sorted(rank.mesh.rank_of(*place) for place in group))
        for which, group in groups_of(job, copies).items()
    }
    groups = {of: collectives.group(of) for of in sorted(set(ranks.values()))}
    return {which: groups[of] for which, of in ranks.items()}


def neighbours(rank: Rank, job: Job) -> set[int]:
    """The other ranks with a stage before or behind one of this rank's, on the same pipe."""
    mesh, placement = rank.mesh, job.placement
    beside = {
        job.place_of(job.pipe_of(mesh.data_rank, mesh.pipe_rank, stage, mesh.member), other)
        for stage in placement.stages_of(mesh.pipe_rank)
        for other in (stage - 1, stage + 1)
        if 0 <= other < job.stages
    }
    return {mesh.rank_of(*place) for place in beside} - {rank.transport.rank}
