"""Several chunks a rank in a loop: smaller pieces, so that the pipeline fills sooner."""

from dataclasses import dataclass

from ..placement import Placement
from ..task import Kind, Task
from .nested import has_room
from .policy import Bounds, Policy, View


@dataclass(frozen=True, slots=True)
class Interleaved(Policy):
    """Forwards go chunk by chunk in groups of p microbatches, in that order and no other; backwards
    after them, from the deepest chunk.

    Bound: min(m v, 2(p - 1 - r) + (v - 1) p + 1), the published warm-up and the one that follows. m
    is a multiple of p.
    Source: Narayanan et al., SC 2021, section 2.2 (interleaved 1F1B).
    """

    name = "interleaved-1f1b"
    splits = False
    placements = ("looped",)

    def key(self, task: Task, view: View) -> tuple[int, ...]:
        return (task.kind is not Kind.FORWARD, *_in_groups(task, view))

    def admits(self, task: Task, view: View) -> bool:
        if task.kind is not Kind.FORWARD:
            return True
        return (
            _is_due(task, view)
            and view.in_flight < self.bounds(view.placement, view.rank, view.microbatches).in_flight
        )

    def bounds(self, placement: Placement, rank: int, microbatches: int) -> Bounds:
        p, v = placement.ranks, placement.chunks
        most = min(microbatches * v, 2 * (p - 1 - rank) + (v - 1) * p + 1)
        return Bounds(most, most)


@dataclass(frozen=True, slots=True)
class InterleavedZeroBubble(Policy):
    """The orders of interleaved-1f1b, input gradients after forwards, weight gradients last; caps
    grow with the chunk.

    Bound: p v - r in flight and p v held. m is a multiple of p.
    Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024; as PyTorch has it interleaved
    (ScheduleInterleavedZeroBubble).
    """

    name = "interleaved-zb"
    splits = True
    placements = ("looped",)

    def key(self, task: Task, view: View) -> tuple[int, ...]:
        return (task.kind is not Kind.FORWARD, *_in_groups(task, view))

    def admits(self, task: Task, view: View) -> bool:
        if task.kind is not Kind.FORWARD:
            return True
        top = view.ranks * view.placement.chunks
        deeper = sum(stage > task.stage for stage in view.placement.stages_of(view.rank))
        return (
            _is_due(task, view)
            and view.in_flight < top - view.rank - deeper
            and has_room(task, view, top)
        )

    def bounds(self, placement: Placement, rank: int, microbatches: int) -> Bounds:
        top = placement.ranks * placement.chunks
        return Bounds(top - rank, top)


def _in_groups(task: Task, view: View) -> tuple[int, int, int]:
    """The order within a kind: chunk by chunk in groups of p microbatches; backwards from the
    deepest chunk."""
    return (
        task.microbatch // view.ranks,
        task.stage if task.kind is Kind.FORWARD else -task.stage,
        task.microbatch,
    )


def _is_due(forward: Task, view: View) -> bool:
    """The forward is the next one in that order."""
    heads = [
        Task(Kind.FORWARD, stage, view.started(Kind.FORWARD, stage))
        for stage in view.placement.stages_of(view.rank)
    ]
    return _in_groups(forward, view) == min(_in_groups(head, view) for head in heads)


@dataclass(frozen=True, slots=True)
class BreadthFirst(Policy):
    """All microbatches through the shallowest chunk, then through the next; backwards the other way
    round, after all forwards.

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
