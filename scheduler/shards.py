"""What the copies of a bucket share out (ZeRO), as a property of a job."""

from dataclasses import replace

from .job import Job
from .reductions import reductions_of
from .stay_planner import plan_stays


def with_shards(job: Job, zero: int, reductions: int = 0, gathered: int = 2) -> Job:
    """The job with shards, where there are several copies.

    Args:
        job: schedule of the run, with its replicas.
        zero: 0: nothing is shared out; 1: masters and the optimizer's state; 2: gradients, too; 3:
            weights, too.
        reductions: number of times that gradients are added up in a step, from `zero` 2 on; 0: as
            often as a rank leaves a stage for another.
        gathered: number of stages whose weights a rank may have whole at a time, with `zero` 3.
    Raises:
        ValueError: the schedule has no room for that; the text begins with the argument.
        RuntimeError: the schedule is stuck.
    """
    if zero == 0 or job.pipes == 1:
        return job
    job = replace(job, shards=True)
    if zero > 1:
        job = replace(job, reductions=reductions_of(job, reductions))
    return replace(job, stays=plan_stays(job, gathered)) if zero > 2 else job
