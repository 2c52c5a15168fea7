"""One member of a team in place of two, where that changes nothing."""

# Two members are alike: where nothing varies they begin a task together, and their slices arrive
# together. Where nothing fills the time at a joint either, a task takes its pieces and its
# exchanges, one after the other, so it may as well come in one piece. With k joints that is a
# simulation of 2 (1 + k) times fewer tasks. Of three members or more the slices of one arrive one
# after the other, so they are not quite alike.
#
# Times are added up in another order. Where two events tie, rounding decides which comes first, and
# a policy may choose otherwise: with equal stages 2 of 384 steps took up to 0.7 % less so.

from collections.abc import Iterator
from dataclasses import replace

from ..job import Job
from .costs import Costs, Edge, Work


def one_member(job: Job, costs: Costs) -> tuple[Job, Costs]:
    """A job of one member, and costs, whose simulation takes as long step by step, ties aside.

    That is where the teams of a job are of two that are alike and wait at joints; else the job and
    costs stay.
    """
    exchanges = costs.exchange_of or (costs.exchange,) * job.stages
    is_alike = not (costs.jitter or costs.lengths or costs.hiccups[0] or costs.stragglers)
    # Longer exchanges are not waited for: other work runs behind a while (`Linger`).
    is_waited_for = max(exchanges) <= costs.of_busiest(job.placement)
    # Members tell each other norms, which may take longer than on a member's own way.
    is_told_at_once = not (job.votes and costs.edge.latency)
    has_own_links = not costs.node and not costs.edge_shared
    is_same = is_alike and is_waited_for and is_told_at_once and has_own_links
    if job.team != 2 or job.fills or job.replicas > 1 or not is_same:
        return job, costs
    works = list(_works(job, costs, exchanges))
    again = {
        stage: share * costs.of_stage(job.placement, stage).forward / (works[stage].forward or 1.0)
        for stage, share in _recomputed(job, costs).items()
    }
    return replace(job, team=1, joints={}), replace(
        costs,
        work=tuple(works),
        recomputed=again,
        exchange=0.0,
        exchange_of=(),
        edges=dict(_edges(job, costs)),
    )


def _works(job: Job, costs: Costs, exchanges: tuple[float, ...]) -> Iterator[Work]:
    for stage, exchange in enumerate(exchanges):
        forward, back, weight, sent = costs.of_stage(job.placement, stage)
        joints, at_joint = job.joints_of(stage), exchange + costs.task
        yield Work(
            forward + joints.forward * at_joint,
            back + joints.back * at_joint,
            weight,
            sent / job.team,
        )


def _recomputed(job: Job, costs: Costs) -> dict[int, float]:
    """The share of a forward that runs again, of each stage that recomputes: nothing is exchanged
    again."""
    return {stage: costs.recomputed.get(stage, 1.0) for stage in job.recomputed}


def _edges(job: Job, costs: Costs) -> Iterator[tuple[tuple[int, int], Edge]]:
    """The links of the first members, as the ranks of a pipeline are numbered."""
    for (source, to), edge in costs.edges.items():
        if source % job.team == 0 and to % job.team == 0:
            yield (source // job.team, to // job.team), edge
