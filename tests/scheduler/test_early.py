"""When a weight gradient is early, and what waiting a moment for what is due is worth."""

from functools import partial
from typing import Any, NamedTuple

import pytest

from axrt.scheduler.job import Job
from axrt.scheduler.linger import LINGER, Linger
from axrt.scheduler.message import Meaning
from axrt.scheduler.placement import Placement, Vee
from axrt.scheduler.plan import zb_v
from axrt.scheduler.policies import Policy, policy_by_name
from axrt.scheduler.policies.planned import Adaptive, AlongPlan
from axrt.scheduler.simulation.costs import Costs, Edge
from axrt.scheduler.simulation.simulator import order_of, simulate
from axrt.scheduler.stash_places import StashMove
from axrt.scheduler.task import AnyKind, Kind, Task

from ..sweeps import swept


class Seen(NamedTuple):
    """What a policy looks at, of the first rank of four with eight microbatches."""

    done: dict[tuple[AnyKind, int], int]
    held: int
    in_flight: int = 0
    rank: int = 0
    ranks: int = 4
    microbatches: int = 8
    placement: Placement = Vee(4)
    policy: Policy = policy_by_name("zb-v")

    @property
    def memo(self) -> dict[Any, Any]:
        return {}

    @property
    def reached(self) -> dict[Any, int]:
        return {}

    def started(self, kind: AnyKind, stage: int) -> int:
        return self.done.get((kind, stage), 0)

    def started_whole(self, kind: AnyKind, stage: int) -> int:
        return self.started(kind, stage)

    def in_flight_of(self, stage: int) -> int:
        raise AssertionError("not asked")

    def forwards_left(self, task: Task) -> bool:
        raise AssertionError("not asked")

    def has_room(self, move: StashMove, stage: int, is_near: bool = True) -> bool:
        raise AssertionError("not asked")

    def has_stepped(self, stage: int, residency: int) -> bool:
        return True

    def has_come(self, meaning: Meaning, stage: int, number: int) -> bool:
        raise AssertionError("not asked")


def after(tasks: int, held: int, microbatches: int = 8) -> Seen:
    """So many tasks of the plan have been done, weight gradients not."""
    done: dict[tuple[AnyKind, int], int] = {}
    for task in [task for task in zb_v(4, 0, microbatches) if task.kind is not Kind.WEIGHT][:tasks]:
        done[task.kind, task.stage] = done.get((task.kind, task.stage), 0) + 1
    return Seen(done, held, microbatches=microbatches)


PLAN = [str(task) for task in zb_v(4, 0, 8)]


def test_a_weight_gradient_before_its_place_in_the_plan_is_early() -> None:
    assert PLAN[:13] == [
        "F0.0",
        "F0.1",
        "F0.2",
        "F0.3",
        "F0.4",
        "F0.5",
        "F0.6",
        "F7.0",
        "I7.0",
        "W7.0",
        "F7.1",
        "I7.1",
        "W7.1",
    ]
    policy, first, second = policy_by_name("zb-v"), Task(Kind.WEIGHT, 7, 0), Task(Kind.WEIGHT, 7, 1)
    assert not policy.is_early(first, after(9, held=7))  # what comes next is F7.1, after it
    assert policy.is_early(second, after(9, held=7))
    assert not policy.is_early(second, after(11, held=7))


@pytest.mark.parametrize("policy", ["zb-v", "adaptive"])
def test_nothing_is_early_that_makes_room_for_what_is_due(policy: str) -> None:
    early, due_is_a_forward, due_is_not = (
        Task(Kind.WEIGHT, 7, 2),
        after(9, held=8),
        after(10, held=8),
    )
    assert not policy_by_name(policy).is_early(early, due_is_a_forward)
    assert policy_by_name(policy).is_early(early, due_is_not)
    assert policy_by_name(policy).is_early(early, after(9, held=7))


def test_a_rank_with_slack_does_not_wait() -> None:
    early, view = Task(Kind.WEIGHT, 7, 2), after(10, held=8)
    order = order_of(Job(Vee(4), policy_by_name("zb-v"), 8), Costs(pieces=1))
    along = partial(AlongPlan, order, needs=(8, 8, 8, 8), strict=False)
    for exact, with_slack in ((Adaptive(8), Adaptive(9)), (along(cap=8), along(cap=9))):
        assert exact.is_early(early, view)
        assert not with_slack.is_early(early, view)


def test_where_the_plan_says_nothing_of_weight_gradients_none_is_early() -> None:
    assert not any(task.kind is Kind.WEIGHT for task in zb_v(4, 0, 7))
    assert not policy_by_name("zb-v").is_early(
        Task(Kind.WEIGHT, 7, 0), after(0, held=0, microbatches=7)
    )
    assert not policy_by_name("zb-h1").is_early(Task(Kind.WEIGHT, 0, 0), after(0, held=0))


@swept(
    ("policy", ["zb-v", "adaptive"]), ("ranks, microbatches", [(4, 8), (8, 16), (8, 32)]), quick=2
)
def test_waiting_a_moment_pays_where_messages_take_time_and_costs_nothing_where_they_do_not(
    policy: str, ranks: int, microbatches: int
) -> None:
    def makespan(**changes: object) -> float:
        costs = Costs(pieces=1, **changes)  # type: ignore[arg-type]
        return simulate(
            Job(Vee(ranks), policy_by_name(policy), microbatches), costs, steps=8
        ).makespan

    slow = {"edge": Edge(0.02), "task": 0.03}
    assert makespan(**slow) < 0.98 * makespan(**slow, linger=0.0)
    assert makespan() == pytest.approx(makespan(linger=0.0))


def test_a_rank_that_waits_says_that_no_input_has_come() -> None:
    line = simulate(
        Job(Vee(4), policy_by_name("zb-v"), 8), Costs(pieces=1, edge=Edge(0.02), task=0.03), steps=2
    )
    assert all(pause.end > pause.start for pause in line.pauses)
    assert {pause.cause for pause in line.pauses} == {"input", "end", "room"}


def test_a_rank_waits_a_share_of_what_is_early() -> None:
    linger = Linger()
    assert linger.defers(10.0, takes=5.0)
    assert linger.until == pytest.approx(10 + 5 * LINGER)
    assert linger.defers(10.5, takes=50.0)  # it waits already
    assert not linger.defers(10.0 + 5 * LINGER, takes=5.0)
    linger.end()
    assert linger.until is None
    assert not linger.defers(12.0, takes=0.0)


@pytest.mark.parametrize("latency", [0.1, 0.25])
def test_where_messages_take_longer_than_a_moment_little_is_lost(latency: float) -> None:
    hasty, patient = (
        simulate(
            Job(Vee(8), policy_by_name("adaptive"), 16),
            Costs(pieces=1, edge=Edge(latency), linger=share),
            steps=8,
        ).makespan
        for share in (0, LINGER)
    )
    assert patient < 1.02 * hasty


def test_pieces_are_not_waited_for() -> None:
    costs: dict[str, Any] = {"pieces": 4, "edge": Edge(0.02)}
    with_and_without = [
        simulate(Job(Vee(4), policy_by_name("zb-v"), 8), Costs(**costs, linger=share)).spans
        for share in (0, LINGER)
    ]
    assert with_and_without[0] == with_and_without[1]
