"""Along a plan: one acyclic order of forwards and input gradients, in which weight gradients float."""

from dataclasses import dataclass

from ..placement import Placement
from ..plan import Plan, zb_v_plan
from ..task import Kind, Task
from .policy import Bounds, View


def _due(plan: Plan, view: View) -> int:
    """The place of the first task of the plan that has not started."""
    heads = [
        Task(kind, stage, view.started(kind, stage)) for stage in view.placement.stages_of(view.rank) for kind in (Kind.FORWARD, Kind.INPUT)
    ]
    return min(plan.place(head, view.microbatches) for head in heads)


def _key(task: Task, view: View) -> tuple[int, ...]:
    """What the plan names in its order; weight gradients after it, of the shallowest stage first: its next forward comes first."""
    if task.kind is Kind.WEIGHT:
        return (1, task.stage, task.microbatch)
    return (0, zb_v_plan(view.ranks, view.rank, view.microbatches).place(task, view.microbatches))


def _admits(task: Task, view: View, cap: int, inputs_ahead: int) -> bool:
    """What is due, within the cap; ahead of it an input gradient by so many places, and so many forwards as the cap exceeds 2p."""
    if task.kind is Kind.WEIGHT:
        return True
    plan = zb_v_plan(view.ranks, view.rank, view.microbatches)
    due, place = _due(plan, view), plan.place(task, view.microbatches)
    if task.kind is Kind.INPUT:
        return place - due <= inputs_ahead
    return view.held < cap and (place == due or _forwards_ahead(plan, due, view) < cap - 2 * view.ranks)


def _forwards_ahead(plan: Plan, due: int, view: View) -> int:
    """How many have started ahead of the plan."""
    stages, m = view.placement.stages_of(view.rank), view.microbatches
    return sum(view.started(Kind.FORWARD, stage) - plan.forwards_before(due, stage, m) for stage in stages)


@dataclass(frozen=True, slots=True)
class ZeroBubbleV:
    """The critical order of zb-v, strictly; weight gradients fill, and make room where a forward lacks it.

    Bound: 2p in flight and held, chunks of half a rank's layers: the memory of 1f1b.
    Source: Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024 (ZB-V).
    """

    name = "zb-v"
    splits = True
    placements = ("vee",)

    def key(self, task: Task, view: View) -> tuple[int, ...]:
        return _key(task, view)

    def admits(self, task: Task, view: View) -> bool:
        return _admits(task, view, cap=2 * view.ranks, inputs_ahead=0)

    def bounds(self, placement: Placement, rank: int, microbatches: int) -> Bounds:
        return Bounds(2 * placement.ranks, 2 * placement.ranks)


@dataclass(frozen=True, slots=True)
class Adaptive:
    """The order of zb-v as a plan with slack: what is due first, else what is next in the plan and not too far ahead of it.

    An input gradient may run two places ahead, a forward while fewer than cap - 2p are ahead and there is room; weight gradients float.
    Bound: the cap, in flight and held; 2p by default, the memory of zb-v.
    Source: axrt's own; docs/schedules.md compares it.
    """

    cap: int = 0  # chunks held on a rank; 0: 2p
    name = "adaptive"
    splits = True
    placements = ("vee",)

    def key(self, task: Task, view: View) -> tuple[int, ...]:
        return _key(task, view)

    def admits(self, task: Task, view: View) -> bool:
        return _admits(task, view, cap=self._cap(view.ranks), inputs_ahead=2)

    def bounds(self, placement: Placement, rank: int, microbatches: int) -> Bounds:
        return Bounds(self._cap(placement.ranks), self._cap(placement.ranks))

    def _cap(self, ranks: int) -> int:
        return max(self.cap, 2 * ranks)
