"""Zero bubble: weight gradients, which nobody waits for, fill the time in which others do."""

from dataclasses import dataclass

from ..placement import Placement
from ..task import Kind, Task
from .policy import Bounds, Policy, View


@dataclass(frozen=True, slots=True)
class ZeroBubbleH1(Policy):
    """Forwards before input gradients before weight gradients, within the memory of 1f1b.

    Bound: p - r in flight, p held.
    Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.2 (ZB-H1).
    """

    name = "zb-h1"
    splits = True
    placements = ("linear",)

    def key(self, task: Task, view: View) -> tuple[int, ...]:
        return (task.kind is not Kind.FORWARD, task.microbatch)

    def admits(self, task: Task, view: View) -> bool:
        return task.kind is not Kind.FORWARD or (
            view.in_flight < view.ranks - view.rank and view.held < view.ranks
        )

    def bounds(self, placement: Placement, rank: int, microbatches: int) -> Bounds:
        return Bounds(placement.ranks - rank, placement.ranks)


@dataclass(frozen=True, slots=True)
class ZeroBubbleH2(Policy):
    """Input gradients before forwards before weight gradients, with twice the memory: no bubble but
    at the ends.

    Bound: 2(p - r) - 1 in flight, 2p held.
    Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.3 (ZB-H2).
    """

    name = "zb-h2"
    splits = True
    placements = ("linear",)

    def key(self, task: Task, view: View) -> tuple[int, ...]:
        return (task.kind is Kind.FORWARD, task.microbatch)

    def admits(self, task: Task, view: View) -> bool:
        return task.kind is not Kind.FORWARD or (
            view.in_flight < 2 * (view.ranks - view.rank) - 1 and view.held < 2 * view.ranks
        )

    def bounds(self, placement: Placement, rank: int, microbatches: int) -> Bounds:
        return Bounds(2 * (placement.ranks - rank) - 1, 2 * placement.ranks)
