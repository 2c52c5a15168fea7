"""Two pipes over the same ranks: what one direction leaves idle the other fills, at the price of
holding every stage twice."""

# To the brain two pipes are two replicas; only the placement knows that they share ranks.
# Microbatch n goes through pipe n mod 2, so a stage's counters have every second number. No rank
# holds one stage of both pipes, and votes, norms, checkpoints and evaluations take pipe 0.

from dataclasses import dataclass

from ..placement import Placement
from ..task import Kind, Task
from .nested import has_room
from .policy import Bounds, Policy, View


@dataclass(frozen=True, slots=True)
class Chimera(Policy):
    """Forwards before backwards, the oldest microbatch first and then the deepest stage; stage s
    has at most min(p/2, p - s) in flight.

    Bound: the sum of its two stages' caps, p/2 + 1 on the outermost ranks and p on the innermost.
    Source: Li and Hoefler, "Chimera", SC 2021, section III (two pipelines, direct concatenation).
    """

    name = "chimera"
    splits = False
    placements = ("bidirectional",)

    def key(self, task: Task, view: View) -> tuple[int, ...]:
        return (task.kind is not Kind.FORWARD, task.microbatch, -task.stage)

    def admits(self, task: Task, view: View) -> bool:
        return task.kind is not Kind.FORWARD or view.in_flight_of(task.stage) < self._cap(
            view.ranks, task.stage
        )

    def bounds(self, placement: Placement, rank: int, microbatches: int) -> Bounds:
        most = sum(self._cap(placement.ranks, stage) for stage in placement.stages_of(rank))
        return Bounds(most, most)

    def _cap(self, ranks: int, stage: int) -> int:
        return min(ranks // 2, ranks - stage)


@dataclass(frozen=True, slots=True)
class DualPipe(Policy):
    """Input gradients before forwards before weight gradients, the oldest microbatch first and then
    the deepest stage.

    Bound: p + 1, in flight and held.
    Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.2.1 (DualPipe); its overlap
    of a forward with a backward is left to the device.
    """

    name = "dualpipe"
    splits = True
    placements = ("bidirectional",)

    def key(self, task: Task, view: View) -> tuple[int, ...]:
        return (task.kind is Kind.FORWARD, task.microbatch, -task.stage)

    def admits(self, task: Task, view: View) -> bool:
        return task.kind is not Kind.FORWARD or has_room(task, view, view.ranks + 1)

    def bounds(self, placement: Placement, rank: int, microbatches: int) -> Bounds:
        return Bounds(placement.ranks + 1, placement.ranks + 1)
