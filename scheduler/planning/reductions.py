"""How often a step adds buckets up over their copies where full gradients are let go in between
(ZeRO stage 2)."""

# A stage's gradient is whole memory from the first backward of a run to its last one, and a
# reduction ends the run. The natural run is that of the schedule: backwards of one stage, on one
# rank, without a backward of another stage between them.

from collections import Counter
from itertools import groupby

from ..job import Job
from ..simulation.simulator import order_of
from ..task import Kind


def reductions_of(job: Job, asked: int) -> int:
    """The number of reductions of a bucket in a step.

    Args:
        asked: that number; 0: as many as there are runs.
    Raises:
        ValueError: the schedule has no room for so many.
        StuckError: the schedule is stuck.
    """
    if job.by_library:
        return max(asked, 1)  # the job refuses more
    if asked > 1 and job.splits:
        raise ValueError(
            f"reductions = {asked} under policy {job.policy.name!r}, whose weight gradients come "
            "after input gradients of later microbatches; expected 1, or a policy with whole "
            "backwards such as '1f1b' or 'breadth-first'"
        )
    if asked > job.microbatches_a_pipe:
        raise ValueError(
            f"reductions = {asked}; expected at most {job.microbatches_a_pipe}, the microbatches "
            "of a step and pipe"
        )
    return asked or runs_of(job)


def runs_of(job: Job) -> int:
    """The most such runs that a stage has in a step, where all tasks take equally long; 1 where
    backwards are split, since weight gradients come after other stages' input gradients.

    Raises:
        StuckError: the schedule is stuck.
    """
    if job.splits:
        return 1
    runs: Counter[tuple[int, int]] = Counter()
    for rank, tasks in enumerate(order_of(job.alone()).rows):
        stages = [task.stage for task in tasks if task.kind is Kind.BACKWARD]
        runs.update((rank, stage) for stage, _ in groupby(stages))
    return min(max(runs.values()), job.microbatches_a_pipe)
