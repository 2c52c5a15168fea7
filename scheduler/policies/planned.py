"""Along a plan: one acyclic order of forwards and input gradients. Weight gradients go wherever
there is time: the plan, where it names them, only says when one comes early, so early that the rank
had better wait a moment for the due task.
"""

from dataclasses import dataclass

from ..order import Order
from ..placement import Placement
from ..plan import Plan, v_min_plan, zb_v_plan
from ..task import Kind, Task
from .policy import Bounds, Policy, View


# A plan's due place only moves on, so policies keep it from look to look (`View.reached`). It was
# worked out anew from all lanes after each start.
def _due(plan: Plan, view: View) -> int:
    """The place of the first task of the plan that has not started, weight gradients aside."""
    if plan in view.reached:  # it is asked for by every head, and most often it is still the same
        due = plan.first_due(view.reached[plan], view.started)
    else:
        due = min(
            plan.place(kind, stage, view.started(kind, stage)) for stage, kind in plan.due_lanes
        )
    view.reached[plan] = due
    return due


def _place(plan: Plan, task: Task, view: View) -> int:
    return plan.place(task.kind, task.stage, task.microbatch // view.placement.pipes)


def _key(plan: Plan, task: Task, view: View) -> tuple[int, ...]:
    """Work of the plan in the plan's order, then other work, that of the shallowest stage first:
    its next forward comes first."""
    if (task.stage, task.kind) in plan.due_lanes:
        return (0, _place(plan, task, view))
    return (1, task.stage, task.microbatch)


def _admits(plan: Plan, task: Task, view: View, cap: int, slack: int | None = None) -> bool:
    """Whether a task may start.

    A forward needs room within the cap. A due task may start. Ahead of it, unless slack is None, a
    forward may start while fewer than `slack` forwards are ahead. A backward may start ahead to
    make room, or, where there is slack, while a backward is due: then it takes no forward's place.

    Nothing runs ahead while a weight gradient waits: that fills the time too, and takes the place
    of nothing that the plan wants sooner.
    """
    if (task.stage, task.kind) not in plan.due_lanes:
        return True
    is_forward = task.kind is Kind.FORWARD
    if is_forward and view.held >= cap:
        return False
    due = _due(plan, view)
    if _place(plan, task, view) == due:
        return True
    a_weight_gradient_waits = view.held > view.in_flight
    if slack is None or a_weight_gradient_waits:
        return False
    if is_forward:
        return _forwards_ahead(plan, due, view) < slack
    return view.held >= cap or (slack > 0 and plan.kind_at(due) is not Kind.FORWARD)


def _is_early(plan: Plan, task: Task, view: View, cap: int) -> bool:
    """By the plan other work comes before this weight gradient, and no forward waits for the room
    that it would make.

    Not to be asked of a rank with slack: what it runs ahead makes up for a late task, and to wait
    would cost more.
    """
    if (task.stage, task.kind) not in plan.lanes:
        return False
    due = _due(plan, view)
    wants_room = view.held >= cap and plan.kind_at(due) is Kind.FORWARD
    return not wants_room and _place(plan, task, view) > due


def _forwards_ahead(plan: Plan, due: int, view: View) -> int:
    """Number of forwards that have started ahead of the plan."""
    stages = view.placement.stages_of(view.rank)
    return sum(
        view.started(Kind.FORWARD, stage) - plan.forwards_before(due, stage) for stage in stages
    )


def _zb_v(view: View) -> Plan:
    return zb_v_plan(view.ranks, view.rank, view.microbatches)


@dataclass(frozen=True, slots=True)
class ZeroBubbleV(Policy):
    """The critical order of zb-v, strictly; weight gradients fill, and make room where a forward
    lacks it.

    Bound: 2p in flight and held, chunks of half a rank's layers: the memory of 1f1b.
    Source: Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024 (ZB-V).
    """

    name = "zb-v"
    splits = True
    placements = ("vee",)

    def key(self, task: Task, view: View) -> tuple[int, ...]:
        return _key(_zb_v(view), task, view)

    def admits(self, task: Task, view: View) -> bool:
        return _admits(_zb_v(view), task, view, cap=2 * view.ranks)

    def is_early(self, task: Task, view: View) -> bool:
        return _is_early(_zb_v(view), task, view, cap=2 * view.ranks)

    def bounds(self, placement: Placement, rank: int, microbatches: int) -> Bounds:
        return Bounds(2 * placement.ranks, 2 * placement.ranks)


@dataclass(frozen=True, slots=True)
class VMin(Policy):
    """Forwards and input gradients strictly by their place in a repeating pattern; weight gradients
    fill, and make room.

    Bound: p chunks in flight and held (2 on one rank): a third to a half of 1f1b's memory.
    Source: Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024 (V-Min).
    """

    name = "v-min"
    splits = True
    placements = ("vee",)

    def key(self, task: Task, view: View) -> tuple[int, ...]:
        return _key(_v_min(view), task, view)

    def admits(self, task: Task, view: View) -> bool:
        return _admits(_v_min(view), task, view, cap=max(2, view.ranks))

    def bounds(self, placement: Placement, rank: int, microbatches: int) -> Bounds:
        return Bounds(max(2, placement.ranks), max(2, placement.ranks))


def _v_min(view: View) -> Plan:
    return v_min_plan(view.ranks, view.rank, view.microbatches)


# Why no other rule where the due task cannot run: six were tried in the simulator (p = 4, eight
# steps, jitter of 0.5), with 2p and with 3p chunks held, and under a GPT's costs without jitter.
#
#   an input gradient or a forward within the slack, then weight gradients     0.753  0.794
#   a forward within the slack, weight gradients, then an input gradient       0.768  0.799
#   weight gradients, then either                                              0.768  0.818  0.896
#   the same, an input gradient only where one place is left                   0.768  0.817  0.903
#   the same, only where no place is left: what stands here                    0.765  0.817  0.912
#   weight gradients, then a forward within the slack, no input gradient       0.764  0.817  0.912
#
# The fourth gained 0.4 % under jitter in the simulator, and lost 0.5 to 1 % on real ranks without.
# Forwards ahead without a bound but the cap gained nothing, and the argument against getting stuck
# needs that bound. Above 2p held an input gradient may overtake another one: where a message takes
# as long as a forward, a plan that was made without latency was in the way, 0.56 before and 0.64
# after (p = 8, 4p held).
@dataclass(frozen=True, slots=True)
class Adaptive(Policy):
    """The order of zb-v as a plan with slack: the due task, else a weight gradient, else the next
    task of the plan.

    A forward runs ahead while fewer than cap - 2p have done so and there is room. An input gradient
    runs ahead where there is no room, or, with a cap above 2p, while another input gradient is due.
    Bound: the cap, in flight and held; 2p by default, the memory of zb-v.
    Source: axrt's own; docs/study.md compares it.
    """

    cap: int = 0  # chunks held on a rank; 0: 2p
    name = "adaptive"
    splits = True
    placements = ("vee",)

    def key(self, task: Task, view: View) -> tuple[int, ...]:
        return _key(_zb_v(view), task, view)

    def admits(self, task: Task, view: View) -> bool:
        cap = self._cap(view.ranks)
        return _admits(_zb_v(view), task, view, cap, slack=cap - 2 * view.ranks)

    def is_early(self, task: Task, view: View) -> bool:
        has_slack = self._cap(view.ranks) > 2 * view.ranks
        return not has_slack and _is_early(_zb_v(view), task, view, cap=2 * view.ranks)

    def bounds(self, placement: Placement, rank: int, microbatches: int) -> Bounds:
        return Bounds(self._cap(placement.ranks), self._cap(placement.ranks))

    def _cap(self, ranks: int) -> int:
        return max(self.cap, 2 * ranks)


@dataclass(frozen=True, slots=True)
class Fixed(Policy):
    """A given order: strictly, or as a plan with the slack that a cap leaves.

    Bound: what the order itself holds, or the cap where that is more.
    Source: whoever gave the order.
    """

    order: Order  # tasks of a step on all ranks
    # number of chunks that each rank must be able to hold to follow the order
    needs: tuple[int, ...]
    cap: int = 0  # largest number of chunks held on a rank; 0: what the order needs
    strict: bool = True  # True if no task that the order names may run ahead of the due one
    name = "fixed"

    @property
    def splits(self) -> bool:
        return self.order.splits

    @property
    def placements(self) -> tuple[str, ...]:
        return (self.order.placement.name,)

    def key(self, task: Task, view: View) -> tuple[int, ...]:
        return _key(self.order.plans[view.rank], task, view)

    def admits(self, task: Task, view: View) -> bool:
        cap = self._cap(view.rank)
        slack = None if self.strict else cap - self.needs[view.rank]
        return _admits(self.order.plans[view.rank], task, view, cap, slack)

    def bounds(self, placement: Placement, rank: int, microbatches: int) -> Bounds:
        return Bounds(self._cap(rank), self._cap(rank))

    def weights_in_turn(self, rank: int) -> bool:
        return self.order.weights_in_turn[rank]

    def weights_by_residency(self, rank: int) -> bool:
        return self.order.weights_by_residency[rank]

    def _cap(self, rank: int) -> int:
        return max(self.cap, self.needs[rank])


@dataclass(frozen=True, slots=True)
class AlongPlan(Fixed):
    """`adaptive`, `zb-h1` or `zb-h2` where costs are known: along an order that was made for them,
    see `plan_choice`. Its weight gradients float unless it is followed strictly.

    Bound: the cap, or what the order holds where that is more.
    Source: axrt's own; docs/study.md compares it.
    """

    like: str = "adaptive"  # name of the policy

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.like

    def key(self, task: Task, view: View) -> tuple[int, ...]:
        return _key(self._plan(view), task, view)

    def admits(self, task: Task, view: View) -> bool:
        cap = self._cap(view.rank)
        slack = None if self.strict else cap - self.needs[view.rank]
        return _admits(self._plan(view), task, view, cap, slack)

    def is_early(self, task: Task, view: View) -> bool:
        cap = self._cap(view.rank)
        has_slack = cap > self.needs[view.rank]
        if self.strict or has_slack:
            return False
        return _is_early(self._plan(view), task, view, cap)

    def weights_in_turn(self, rank: int) -> bool:
        return not self.strict or self.order.weights_in_turn[rank]

    def weights_by_residency(self, rank: int) -> bool:
        return not self.strict or self.order.weights_by_residency[rank]

    def _plan(self, view: View) -> Plan:
        return (self.order.plans if self.strict else self.order.floating_plans)[view.rank]
