"""What the copies of a bucket share out (ZeRO), and the groups in which they add up, as properties
of a job."""

from dataclasses import replace

from ..job import Job
from .reductions import reductions_of
from .residency_planner import plan_residencies

# docs/schedules.md has the simulations. A user who knows the nodes sets `parallel.group`.
_MOST_AT_ONCE = 8  # replicas that add up in one level
_USUAL_NODE = 8  # ranks of a node


# Groups are replicas, not hosts, by default, and depend on their number alone. Groups by host were
# considered: the same settings would have other bits on other nodes. Who knows the nodes says so
# (`parallel.group`).
def usual_group(replicas: int, ranks: int) -> int:
    """The number of replicas of a group that suits most machines; 0: all, since there are few
    replicas or they have no groups.

    It depends on nothing else, so that the bits of a sum do not depend on the machine.

    Args:
        ranks: number of ranks of each, which are neighbours.
    Returns:
        As many as fill a node of 8 ranks or a half, a quarter of it; where a replica fills one, the
        number with the fewest messages.
    """
    if replicas <= _MOST_AT_ONCE:
        return 0
    fit = [group for group in range(2, replicas) if replicas % group == 0]
    within = [group for group in fit if _USUAL_NODE % (group * ranks) == 0]
    if within:
        return max(within)
    return min(fit, key=lambda group: (group + replicas // group, -group), default=0)


def with_shards(
    job: Job,
    zero: int,
    reductions: int = 0,
    gathered: int = 2,
    group: int = 0,
    offloads_weights: bool = False,
) -> Job:
    """The job with groups and shards, where there are several copies, and with weights in scratch.

    Args:
        zero: 0: nothing is shared out; 1: masters and the optimizer's state; 2: gradients, too; 3:
            weights, too.
        reductions: number of times that gradients are added up in a step, from `zero` 2 on; 0: as
            often as a rank leaves a stage for another.
        gathered: number of stages whose weights a rank may have whole at a time, with `zero` 3 or
            weights in scratch.
        group: number of replicas that add up among themselves before groups do across, and that
            share out among themselves; 0: all.
        offloads_weights: True if weights are in scratch, and come to the device for residencies.
    Raises:
        ValueError: the schedule has no room for that; the text begins with the argument.
        StuckError: the schedule is stuck.
    """
    if 0 < group < job.replicas:
        if job.replicas % group:
            raise ValueError(f"group = {group}; expected a divisor of the {job.replicas} replicas")
        job = replace(job, group=group * job.placement.pipes * job.team)
    if zero > 0 and job.pipes > job.team:
        job = replace(job, shards=True)
        if zero > 1:
            job = replace(job, reductions=reductions_of(job, reductions))
    if (job.shards and zero > 2) or offloads_weights:
        residencies = plan_residencies(job, gathered)
        job = replace(job, residencies=residencies, offloads_weights=offloads_weights)
    return job
