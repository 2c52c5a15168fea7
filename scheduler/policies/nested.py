"""Caps that grow with the stage: for any placement, whatever the order of events."""

from dataclasses import dataclass

from ..placement import Placement
from ..task import Kind, Task
from .policy import Bounds, Policy, View


def has_room(forward: Task, view: View, top: int) -> bool:
    """A forward is within the cap of its stage on what the rank holds.

    Args:
        forward: forward that may start.
        top: cap of the rank's deepest stage, in chunks; each shallower stage has one less.
    """
    return view.held < top - sum(
        stage > forward.stage for stage in view.placement.stages_of(view.rank)
    )


# Evaluations take the first pipe and nested caps: forwards alone keep one pipe full.
@dataclass(frozen=True, slots=True)
class Nested(Policy):
    """Backwards first, then the oldest forward of the deepest stage; chunk c of a rank may start
    while fewer than 2p + c are in flight.

    Evaluations follow this rule. They have no backwards to compute, so gradients come back at once
    and no rank waits for room.
    Bound: 2p + v - 1.
    """

    name = "nested"
    splits = False
    placements = ("linear", "looped", "vee")

    def key(self, task: Task, view: View) -> tuple[int, ...]:
        return (task.kind is Kind.FORWARD, -task.stage, task.microbatch)

    def admits(self, task: Task, view: View) -> bool:
        return task.kind is not Kind.FORWARD or has_room(
            task, view, 2 * view.ranks + view.placement.chunks - 1
        )

    def bounds(self, placement: Placement, rank: int, microbatches: int) -> Bounds:
        most = 2 * placement.ranks + placement.chunks - 1
        return Bounds(most, most)
