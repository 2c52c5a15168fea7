"""Several chunks a rank in a loop: smaller pieces, so that the pipeline fills sooner."""

from dataclasses import dataclass

from ..placement import Placement
from ..task import Kind, Task
from .policy import Bounds, Policy, View


@dataclass(frozen=True, slots=True)
class Interleaved(Policy):
    """Forwards go chunk by chunk in groups of p microbatches, in that order and no other; backwards after them, from the deepest chunk.

    Bound: min(m v, 2(p - 1 - r) + (v - 1) p + 1), the published warm-up and the one that follows. m is a multiple of p.
    Source: Narayanan et al., SC 2021, section 2.2 (interleaved 1F1B).
    """

    name = "interleaved-1f1b"
    splits = False
    placements = ("looped",)

    def key(self, task: Task, view: View) -> tuple[int, ...]:
        if task.kind is Kind.FORWARD:
            return (0, *self._order(task.stage, task.microbatch, view))
        return (1, task.microbatch // view.ranks, -task.stage, task.microbatch)

    def admits(self, task: Task, view: View) -> bool:
        if task.kind is not Kind.FORWARD:
            return True
        heads = [self._order(stage, view.started(Kind.FORWARD, stage), view) for stage in view.placement.stages_of(view.rank)]
        is_due = self._order(task.stage, task.microbatch, view) == min(heads)
        return is_due and view.in_flight < self.bounds(view.placement, view.rank, view.microbatches).in_flight

    def bounds(self, placement: Placement, rank: int, microbatches: int) -> Bounds:
        p, v = placement.ranks, placement.chunks
        most = min(microbatches * v, 2 * (p - 1 - rank) + (v - 1) * p + 1)
        return Bounds(most, most)

    def _order(self, stage: int, microbatch: int, view: View) -> tuple[int, int, int]:
        return (microbatch // view.ranks, stage, microbatch)


@dataclass(frozen=True, slots=True)
class BreadthFirst(Policy):
    """All microbatches through the shallowest chunk, then through the next; backwards the other way round, after all forwards.

    Each stage's weights are used in one run, so that weights that are sharded are gathered once.
    Bound: m v.
    Source: Lamy-Poirier, "Breadth-First Pipeline Parallelism", MLSys 2023.
    """

    name = "breadth-first"
    splits = False
    placements = ("looped",)

    def key(self, task: Task, view: View) -> tuple[int, ...]:
        forward = task.kind is Kind.FORWARD
        return (not forward, task.stage if forward else -task.stage, task.microbatch)

    def admits(self, task: Task, view: View) -> bool:
        return True

    def bounds(self, placement: Placement, rank: int, microbatches: int) -> Bounds:
        return Bounds(microbatches * placement.chunks, microbatches * placement.chunks)
