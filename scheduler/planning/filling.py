"""Whether other work fills the time in which a task waits at a joint, or the rank waits as well."""

# Filling begins other microbatches, and so needs room for them. Under caps that leave none, as
# those of 1f1b, a rank loses the order of its tasks by it and gains little. Which it is depends on
# the policy and its caps far more than on how long slices take or how many joints there are. So
# nothing is measured: all pieces are alike, and joints beyond a few are left out.

from dataclasses import replace

from ..job import Job
from ..numbering import StageJoints
from ..policies import Fixed
from ..simulation.costs import Costs, Work
from ..simulation.simulator import simulate

_SLICES = 0.5  # duration of an exchange, in pieces
_JOINTS = 7  # of a task, at most: a block of attention has four, and its table has seven
_LARGEST = 5_000  # pieces of a step, which take about a second to simulate


def fills(job: Job) -> bool:
    """True if a step is faster where other work fills the time, or where both are equal.

    Args:
        job: a job; where no stage has joints, the answer is True. Of a large step the first
            microbatches are simulated.
    """
    if not job.joints:
        return True
    joints = {
        stage: StageJoints(min(of.forward, _JOINTS), min(of.back, _JOINTS))
        for stage, of in job.joints.items()
    }
    # A piece takes 1, and each half of a backward as long as a forward.
    takes = [1 + (joints[stage].forward if stage in joints else 0) for stage in range(job.stages)]
    small = replace(job.alone(), team=2, joints=joints, microbatches=_some(job, sum(takes)))
    costs = Costs(tuple(Work(one, one, one) for one in takes), exchange=_SLICES)
    always, never = (simulate(replace(small, fills=way), costs).makespan for way in (True, False))
    return always <= never


def _some(job: Job, pieces: int) -> int:
    """As many microbatches as can be simulated soon; all of them along an order, which names each.

    Args:
        pieces: number of pieces of a forward, over all stages.
    """
    if isinstance(job.policy, Fixed):
        return job.microbatches
    # Some policies take multiples of the ranks alone, and each pipe as many as the other.
    unit = job.ranks * job.placement.pipes
    most = max(1, _LARGEST // (3 * 2 * pieces) // unit) * unit
    return min(job.microbatches, most)
