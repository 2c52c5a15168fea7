"""Which residencies a step has, from the order in which a rank comes to its stages."""

# A steady machine runs the schedule once without a limit. That says which stage is needed next, so
# where room is short the stage whose next use is farthest away is let go (Belady 1966). The
# residencies of a rank begin in one order; within them tasks run as messages arrive.

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from math import inf

from ..job import Job
from ..policies import Fixed
from ..residencies import READERS, Residencies, Residency
from ..simulation.simulator import order_of
from ..task import Kind, Task


# Residencies are planned, and counted in stages. Weights that each rank asks for when it needs them
# would take a task on the owner for each asker, with counters of its own, and none could say how
# much is sent. A budget in bytes needs the sizes of layers before the schedule is chosen; stages
# are cut to be alike, and the ledger says the bytes.
def plan_residencies(job: Job, capacity: int) -> Residencies:
    """The residencies of a job, with as few gathers as that allows.

    Args:
        capacity: number of stages whose weights a rank may have whole at a time, at least 1.
    Raises:
        ValueError: a rank has no room for all of its stages, and the schedule has two pipes, so
            that copies of a stage come to it at different times, or is an order from a file that
            runs ahead, or one in which weight gradients come late.
        StuckError: the schedule is stuck.
    """
    chunks = job.placement.chunks
    if isinstance(job.policy, Fixed) and 1 < capacity < chunks:
        raise ValueError(
            f"gathered = {capacity} under policy {job.policy.name!r} along an order, whose "
            "forwards may run ahead into stages that come later; expected 1, or "
            f"{chunks}, all stages of a rank"
        )
    late = [rank for rank in range(job.ranks) if not job.policy.weights_by_residency(rank)]
    if late and capacity < chunks:
        raise ValueError(
            f"gathered = {capacity} under policy {job.policy.name!r} along an order in which a "
            f"weight gradient of rank {late[0]} comes behind work of another stage, whose weights "
            f"may find no room then; expected an order that names none, or {chunks}, all of "
            "a rank's stages"
        )
    if job.placement.pipes > 1 and capacity < chunks:
        raise ValueError(
            f"gathered = {capacity} under policy {job.policy.name!r}, whose two pipes come to a "
            f"stage at different times; expected at least {chunks}, all stages of a rank"
        )
    of_stage: dict[int, list[Residency]] = {stage: [] for stage in range(job.stages)}
    order = []
    for tasks in order_of(job.alone()).rows:
        rank = _Rank([task for task in tasks if task.kind in READERS], capacity)
        order.append(tuple(rank.begun))
        for stage, residency in rank.ended:
            of_stage[stage].append(residency)
    if job.placement.pipes > 1:  # one residency of each stage, which every copy has
        whole = Residency(*[job.microbatches_a_pipe] * 3)
        of_stage = {stage: [whole] for stage in of_stage}
    return Residencies(
        capacity, tuple(tuple(of_stage[stage]) for stage in sorted(of_stage)), tuple(order)
    )


class _Rank:
    """The residencies of a rank in a step.

    Args:
        capacity: number of stages that it may have at a time.
    Attributes:
        begun: stages, in the order in which their residencies begin.
        ended: stages with their residencies, in the order in which those end.
    """

    def __init__(self, tasks: Sequence[Task], capacity: int) -> None:
        self.begun: list[int] = []
        self.ended: list[tuple[int, Residency]] = []
        self._ran: Counter[tuple[int, object]] = Counter()
        uses: dict[int, deque[float]] = defaultdict(deque)  # of each stage, those to come
        for place, task in enumerate(tasks):
            uses[task.stage].append(place)
        here: list[int] = []
        for task in tasks:
            if task.stage not in here:
                if len(here) == capacity:
                    farthest = max(here, key=lambda stage: uses[stage][0] if uses[stage] else inf)
                    here.remove(farthest)
                    self._end(farthest)
                here.append(task.stage)
                self.begun.append(task.stage)
            uses[task.stage].popleft()
            self._ran[task.stage, task.kind] += 1
        for stage in here:
            self._end(stage)

    def _end(self, stage: int) -> None:
        forwards, again = self._ran[stage, Kind.FORWARD], self._ran[stage, Kind.RECOMPUTE]
        backwards = self._ran[stage, Kind.BACKWARD] + self._ran[stage, Kind.INPUT]
        self.ended.append((stage, Residency(forwards, again, backwards)))
