"""Two chunks a rank in a V, under caps instead of an order (for orders see `planned.py`)."""

from dataclasses import dataclass

from ..placement import Placement
from ..task import AnyKind, Kind, Task
from .nested import has_room
from .policy import Bounds, Policy, View


@dataclass(frozen=True, slots=True)
class DualPipeV(Policy):
    """Forwards before input gradients before weight gradients, the deepest stage first: every ready
    task runs, up to a cap.

    Bound: `cap`, in flight and held.
    Source: the V-shaped cut of DualPipe, published with it by DeepSeek-AI, 2025 ("cut in half": one
    copy of the weights).
    """

    cap: int = 0  # chunks held; never less than 2p + 1
    name = "dualpipe-v"
    splits = True
    placements = ("vee",)

    def key(self, task: Task, view: View) -> tuple[int, ...]:
        return (task.kind is not Kind.FORWARD, -task.stage, task.microbatch)

    def admits(self, task: Task, view: View) -> bool:
        return task.kind is not Kind.FORWARD or has_room(task, view, self._cap(view.ranks))

    def bounds(self, placement: Placement, rank: int, microbatches: int) -> Bounds:
        return Bounds(self._cap(placement.ranks), self._cap(placement.ranks))

    def _cap(self, ranks: int) -> int:
        return max(self.cap, 2 * ranks + 1)


@dataclass(frozen=True, slots=True)
class VHalf(Policy):
    """Forward of the deep chunk, input gradient of the shallow one, then the other two; stage s has
    at most p + 1 - s/2 in flight.

    Bound: p + 2 chunks in flight and held, half of 1f1b's memory and a microbatch.
    Source: Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024 (V-Half).
    """

    name = "v-half"
    splits = True
    placements = ("vee",)

    def key(self, task: Task, view: View) -> tuple[int, ...]:
        is_deep = task.stage >= view.ranks
        order: dict[tuple[AnyKind, bool], int] = {
            (Kind.FORWARD, True): 0,
            (Kind.INPUT, False): 1,
            (Kind.FORWARD, False): 2,
            (Kind.INPUT, True): 3,
        }
        return (order.get((task.kind, is_deep), 4), task.microbatch, task.stage)

    def admits(self, task: Task, view: View) -> bool:
        if task.kind is not Kind.FORWARD:
            return True
        of_stage = view.ranks + (2 - task.stage) // 2  # the ceiling of (2p - s) / 2 + 1/2
        return view.in_flight_of(task.stage) < of_stage and has_room(task, view, view.ranks + 2)

    def bounds(self, placement: Placement, rank: int, microbatches: int) -> Bounds:
        return Bounds(placement.ranks + 2, placement.ranks + 2)
