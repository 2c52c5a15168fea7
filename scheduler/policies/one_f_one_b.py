"""One forward, one backward: forwards under a cap that tapers towards the last rank, else
backwards."""

# A cap that is reached makes the two alternate. Where durations vary, the forward that a backward
# has made room for comes before the next backward: ranks behind wait for it, and backwards first
# would let them run dry (docs/study.md).

from dataclasses import dataclass

from ..placement import Placement
from ..task import Kind, Task
from .policy import Bounds, Policy, View


@dataclass(frozen=True, slots=True)
class OneForwardOneBackward(Policy):
    """Forwards before backwards; rank r has at most p - r microbatches in flight.

    Bound: p - r.
    Source: Fan et al., "DAPPLE", PPoPP 2021; Narayanan et al., SC 2021, section 2.2
    (PipeDream-flush).
    """

    name = "1f1b"
    splits = False
    placements = ("linear",)

    def key(self, task: Task, view: View) -> tuple[int, ...]:
        return (task.kind is not Kind.FORWARD, task.microbatch)

    def admits(self, task: Task, view: View) -> bool:
        return task.kind is not Kind.FORWARD or view.in_flight < view.ranks - view.rank

    def bounds(self, placement: Placement, rank: int, microbatches: int) -> Bounds:
        return Bounds(placement.ranks - rank, placement.ranks - rank)


@dataclass(frozen=True, slots=True)
class EagerOneForwardOneBackward(Policy):
    """1f1b with room for messages on the wire: rank r has at most 2(p - r) - 1 microbatches in
    flight.

    Bound: 2(p - r) - 1; it hides a latency of up to half a forward and backward on every edge.
    Source: Zhuang et al., "On optimizing the communication of model parallelism", MLSys 2023
    (eager-1F1B).
    """

    name = "eager-1f1b"
    splits = False
    placements = ("linear",)

    def key(self, task: Task, view: View) -> tuple[int, ...]:
        return (task.kind is not Kind.FORWARD, task.microbatch)

    def admits(self, task: Task, view: View) -> bool:
        return task.kind is not Kind.FORWARD or view.in_flight < 2 * (view.ranks - view.rank) - 1

    def bounds(self, placement: Placement, rank: int, microbatches: int) -> Bounds:
        most = 2 * (placement.ranks - rank) - 1
        return Bounds(most, most)
