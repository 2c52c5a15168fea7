"""The simulator against published tables, formulas and bounds."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axrt.scheduler.job import Job
from axrt.scheduler.lacks import END, INPUT, ROOM
from axrt.scheduler.order import Order
from axrt.scheduler.placement import Linear
from axrt.scheduler.plan import zb_v_plan
from axrt.scheduler.policies import NAMES, Fixed, Nested, placement_for, policy_by_name
from axrt.scheduler.simulation.costs import Costs, Edge, Work
from axrt.scheduler.simulation.simulator import simulate
from axrt.scheduler.simulation.timeline import Timeline
from axrt.scheduler.task import Kind, Task

from ..sweeps import examples
from .test_policies import fitting


def ran(
    name: str,
    ranks: int = 4,
    microbatches: int = 8,
    steps: int = 1,
    clips: bool = False,
    chunks: int = 0,
    cap: int = 0,
    latency: float = 0.0,
    **costs: Any,
) -> Timeline:
    policy = policy_by_name(name, cap)
    placement = placement_for(policy, ranks, microbatches, chunks=chunks)
    recomputed = dict.fromkeys(costs.get("recomputed", ()), 1)
    job = Job(placement, policy, microbatches, recomputed=recomputed, votes=clips)
    return simulate(job, Costs(edge=Edge(latency), **costs), steps=steps)


# Makespan, largest span, in flight and held on each rank, for p = 4 and m = 8 with tF = tI = tW =
# 1: what the published generators give.
ORACLES = {
    "gpipe": (33, 33, [8, 8, 8, 8], [8, 8, 8, 8]),
    "1f1b": (33, 33, [4, 3, 2, 1], [4, 3, 2, 1]),
    "axonn": (33, 33, [4, 4, 4, 1], [4, 4, 4, 1]),
    "eager-1f1b": (33, 33, [7, 5, 3, 1], [7, 5, 3, 1]),
    "interleaved-1f1b": (28.5, 28.5, [11, 9, 7, 5], [11, 9, 7, 5]),
    "breadth-first": (28.5, 28.5, [16, 16, 16, 16], [16, 16, 16, 16]),
    "zb-h1": (27, 27, [4, 3, 2, 1], [4, 4, 4, 4]),
    "zb-h2": (27, 24, [7, 5, 3, 1], [8, 8, 8, 8]),
    "zb-v": (25.5, 24, [8, 8, 8, 8], [8, 8, 8, 8]),
    "chimera": (30, 30, [3, 4, 4, 3], [3, 4, 4, 3]),
    "interleaved-zb": (25.5, 25.5, [8, 7, 6, 5], [8, 8, 8, 8]),
    "v-half": (26.5, 26.5, [6, 6, 6, 6], [6, 6, 6, 6]),
    "v-min": (29.5, 29.5, [4, 4, 4, 4], [4, 4, 4, 4]),
    "dualpipe": (26, 26, [5, 5, 5, 5], [5, 5, 5, 5]),
    "dualpipe-v": (27, 27, [9, 9, 9, 9], [9, 9, 9, 9]),
}


@pytest.mark.parametrize("name", ORACLES)
def test_every_row_is_met_or_beaten(name: str) -> None:
    makespan, span, in_flight, held = ORACLES[name]
    line = ran(name)
    assert line.makespan <= makespan
    assert max(line.span) <= span
    assert all(mine <= published for mine, published in zip(line.in_flight, in_flight, strict=True))
    assert all(mine <= published for mine, published in zip(line.held, held, strict=True))


def test_recomputation_fills_the_time_in_which_a_gradient_is_under_way() -> None:
    """Published: 38 for the shifted critical path, 44 for 1f1b where every stage recomputes."""
    but_the_last, all_stages = dict.fromkeys(range(3), 1.0), dict.fromkeys(range(4), 1.0)
    shifted = ran("merak", recomputed=but_the_last)
    assert shifted.makespan <= 38
    assert shifted.in_flight == [4, 3, 2, 1]
    assert ran("1f1b", recomputed=all_stages).makespan <= 44
    for rank in range(3):
        ahead = 0
        for span in (span for span in shifted.spans if span.rank == rank):
            ahead += (span.task.kind is Kind.RECOMPUTE) - (span.task.kind is Kind.BACKWARD)
            assert 0 <= ahead <= 2


def test_a_rank_that_waits_for_gradients_does_not_wait_for_room() -> None:
    """A recomputation that may not run yet is no cap: the rank lacks a gradient."""
    plain, again = (
        ran("gpipe", 2, 4, latency=5.0, recomputed=of) for of in ({}, {0: 0.01, 1: 0.01})
    )
    assert again.idle(ROOM) == plain.idle(ROOM) == [0, 0]


def test_a_plan_with_slack_goes_on_with_other_backwards_where_messages_are_slow() -> None:
    """0.64 where an input gradient could only take a place that no forward had room for."""
    assert ran("adaptive", 4, 8, steps=6, cap=16, latency=1.0).utilisation > 0.68


def test_pipes_vary_each_by_itself() -> None:
    line = ran("chimera", jitter=0.5)
    taken = {
        span.task.microbatch: span.end - span.start
        for span in line.spans
        if span.task.kind is Kind.FORWARD and span.task.stage == 0
    }
    assert len(set(taken.values())) == 8


def test_a_late_gradient_lets_the_next_forward_run() -> None:
    """Rank 2 of four may have two in flight under 1f1b; under varuna it goes on while the gradient
    is under way."""
    assert ran("varuna", latency=3.0).in_flight[2] > ran("1f1b", latency=3.0).in_flight[2]
    assert ran("varuna", latency=0.5).makespan < ran("1f1b", latency=0.5).makespan


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_two_pipes_follow_the_published_formulas(ranks: int) -> None:
    """Chimera with tF = tB, N = D: 2N + D - 2 slots; DualPipe: a bubble of (P/2 - 1)(tF&B + tB -
    3tW), tF&B being tF + tB here."""
    policy, p = policy_by_name("chimera"), ranks
    slots = simulate(Job(placement_for(policy, p, p), policy, p), Costs(Work(1, 1, 0))).makespan
    assert slots <= 2 * p + p - 2
    m = 4 * p
    bubble = (p // 2 - 1) * (3 + 2 - 3)
    assert max(ran("dualpipe", p, m).span) <= 3 * m + bubble


@pytest.mark.parametrize(
    ("latency", "name", "makespan"),
    [
        (0.25, "gpipe", 34.5),
        (0.25, "1f1b", 37),
        (0.25, "eager-1f1b", 34.5),
        (0.25, "interleaved-1f1b", 32),
        (0.25, "breadth-first", 30),
        (0.25, "zb-v", 28.75),
        (0.5, "1f1b", 41),
        (0.5, "axonn", 41),
        (0.5, "eager-1f1b", 36),
    ],
)
def test_every_row_with_latency_is_met_or_beaten(
    latency: float, name: str, makespan: float
) -> None:
    assert ran(name, latency=latency).makespan <= makespan


@pytest.mark.parametrize("ranks", [1, 2, 4, 6])
@pytest.mark.parametrize("microbatches", [12, 24])
def test_makespans_and_spans_follow_the_published_formulas(ranks: int, microbatches: int) -> None:
    p, m, forward, weight, back = ranks, microbatches, 1.0, 1.0, 2.0
    for name in ("gpipe", "1f1b"):
        assert ran(name, p, m).makespan == pytest.approx((m + p - 1) * (forward + back))
    for name in ("interleaved-1f1b", "breadth-first"):
        for chunks in (1, 2, 3):
            line = ran(name, p, m, chunks=chunks)
            assert (
                line.makespan <= m * (forward + back) + (p - 1) * (forward + back) / chunks + 1e-9
            )
    ideal = m * (forward + back)
    assert max(ran("1f1b", p, m).span) == pytest.approx(ideal + (p - 1) * (forward + back))
    assert max(ran("zb-h1", p, m).span) <= ideal + (p - 1) * (forward + 1.0 - weight) + 1e-9
    assert (
        max(ran("zb-h2", p, m).span)
        <= ideal + max(0.0, (p - 1) * (forward + 1.0 - 2 * weight)) + 1e-9
    )


@given(
    st.sampled_from(NAMES),
    st.integers(1, 6),
    st.integers(1, 14),
    st.integers(1, 3),
    st.integers(1, 3),
    st.tuples(st.floats(0.1, 3), st.floats(0.1, 3), st.floats(0.1, 3)),
    st.floats(0, 2),
    st.floats(0, 1),
    st.booleans(),
    st.sampled_from([0.0, 0.0, 0.5, 1.0]),
    st.integers(0, 99),
)
@examples(150, quick=25)
def test_any_costs_latencies_and_jitter_keep_work_order_and_bounds(
    name: str,
    ranks: int,
    microbatches: int,
    steps: int,
    chunks: int,
    work: tuple[float, float, float],
    latency: float,
    jitter: float,
    clips: bool,
    again: float,
    seed: int,
) -> None:
    policy = policy_by_name(name)
    placement, microbatches = fitting(policy, ranks, microbatches, chunks)
    recomputed = dict.fromkeys(range(placement.stages), again) if again else {}
    costs = Costs(Work(*work), edge=Edge(latency), jitter=jitter, recomputed=recomputed, seed=seed)
    line = simulate(
        Job(placement, policy, microbatches, recomputed=dict.fromkeys(recomputed, 1), votes=clips),
        costs,
        steps=steps,
    )
    for rank in range(placement.ranks):
        mine = [span for span in line.spans if span.rank == rank]
        assert all(one.end <= next_one.start + 1e-9 for one, next_one in pairwise(mine))
        bounds = policy.bounds(placement, rank, microbatches)
        assert line.in_flight[rank] <= bounds.in_flight
        assert line.held[rank] <= bounds.held
        if not jitter:
            busy = sum(span.end - span.start for span in mine)
            assert busy == pytest.approx(steps * microbatches * (sum(work) + again * work[0]))
        assert line.idle()[rank] == pytest.approx(
            line.makespan - sum(span.end - span.start for span in mine), abs=1e-6
        )


def test_one_microbatch_goes_down_and_back() -> None:
    for name in NAMES:
        policy, p = policy_by_name(name), 4
        placement, m = fitting(policy, p, 1, 2)
        makespan = simulate(Job(placement, policy, m), Costs()).makespan
        if name in ("1f1b", "axonn", "eager-1f1b", "gpipe"):
            assert makespan == p * 3
        elif name.startswith("zb-h"):
            assert p * 2 + 1 <= makespan <= p * 3


def test_why_a_rank_is_idle_is_told() -> None:
    line = ran("1f1b", latency=0.5)
    assert [line.idle(cause)[0] > 0 for cause in (INPUT, ROOM, END)] == [True, True, False]
    assert [line.idle(cause)[3] > 0 for cause in (INPUT, ROOM, END)] == [True, False, True]


def test_policies_meet_the_same_durations() -> None:
    def durations(name: str) -> dict[str, float]:
        line = ran(name, jitter=0.5, seed=3)
        return {
            str(span.task): span.end - span.start
            for span in line.spans
            if span.task.kind is Kind.FORWARD
        }

    assert durations("1f1b") == pytest.approx(durations("gpipe"))
    assert durations("1f1b") == pytest.approx(durations("zb-h2"))
    other = ran("1f1b", jitter=0.5, seed=4)
    assert other.makespan != ran("1f1b", jitter=0.5, seed=3).makespan


def test_a_straggler_and_hiccups_take_their_time() -> None:
    policy = policy_by_name("1f1b")
    slow = simulate(Job(Linear(4), policy, 8), Costs(stragglers={2: 1.5}))
    assert slow.makespan > 1.3 * ran("1f1b").makespan
    assert (
        simulate(Job(Linear(4), policy, 8), Costs(hiccups=(0.1, 6.0))).makespan
        > ran("1f1b").makespan
    )


def test_a_vote_holds_steps_apart_and_without_one_they_overlap() -> None:
    apart, free = ran("zb-v", steps=8, clips=True), ran("zb-v", steps=8)
    assert free.utilisation > 0.98
    assert apart.utilisation < free.utilisation - 0.03


def test_an_evaluation_takes_its_forwards_and_the_way_through() -> None:
    line = simulate(Job(Linear(4), Nested(), 9, trains=False), Costs(Work(input=0, weight=0)))
    assert line.makespan == 9 + 4 - 1


@pytest.mark.parametrize("cap", [0, 12])
def test_adaptive_runs_ahead_of_the_plan_only_where_no_weight_gradient_waits_and_not_too_far(
    cap: int,
) -> None:
    ranks, m, steps = 4, 8, 3
    line = ran("adaptive", ranks, m, steps, cap=cap, jitter=0.5, seed=1)
    ahead: list[Kind] = []
    for rank in range(ranks):
        plan = zb_v_plan(ranks, rank, m)
        left, waiting, early, held = (
            {at for at in range(plan.length * steps) if plan.kind_at(at) is not Kind.WEIGHT},
            0,
            set[int](),
            0,
        )
        for span in sorted(
            (span for span in line.spans if span.rank == rank), key=lambda span: span.start
        ):
            kind = span.task.kind
            if kind in (Kind.FORWARD, Kind.INPUT):
                place, due = (
                    plan.place(span.task.kind, span.task.stage, span.task.microbatch),
                    min(left),
                )
                left.remove(place)
                early = {other for other in early if other > due}
                if place != due:
                    ahead.append(kind)
                    assert not waiting
                    if kind is Kind.FORWARD:
                        early.add(place)
                        assert len(early) <= cap - 2 * ranks
                    else:
                        for_another = cap > 2 * ranks and plan.kind_at(due) is Kind.INPUT
                        assert for_another or held >= max(cap, 2 * ranks) - 1, "room is not short"
            held += (kind is Kind.FORWARD) - (
                kind is Kind.WEIGHT and span.task.part == Costs().pieces - 1
            )
            waiting += (kind is Kind.INPUT) - (
                kind is Kind.WEIGHT and span.task.part == Costs().pieces - 1
            )
    assert set(ahead) == ({Kind.FORWARD, Kind.INPUT} if cap else {Kind.INPUT})


def test_running_ahead_of_the_plan_pays_under_jitter_where_there_is_room() -> None:
    """Of three seeds; docs/study.md has the study."""
    gains = []
    for seed in range(3):
        strict, ahead = (
            ran("zb-v", 8, 16, 8, jitter=0.5, seed=seed),
            ran("adaptive", 8, 16, 8, cap=24, jitter=0.5, seed=seed),
        )
        gains.append(ahead.utilisation - strict.utilisation)
    assert min(gains) > 0.03


def test_costs_may_differ_between_stages_and_edges() -> None:
    policy, work = policy_by_name("gpipe"), (Work(1, 1, 1), Work(2, 2, 1), Work(1, 3, 0))
    line = simulate(Job(Linear(3), policy, 1), Costs(work))
    durations = {str(span.task): span.end - span.start for span in line.computing()}
    assert durations == {"F0.0": 1, "F1.0": 2, "F2.0": 1, "B0.0": 2, "B1.0": 3, "B2.0": 3}
    assert line.ideal == 5
    far = simulate(Job(Linear(3), policy, 1), Costs(work, edges={(1, 2): Edge(latency=4)}))
    assert far.makespan == line.makespan + 4


def test_messages_on_an_edge_wait_for_each_other_and_not_for_those_of_other_edges() -> None:
    """The last rank's backwards are done at once, so four gradients of size 1 leave together, one a
    time unit."""
    costs = Costs(
        (Work(1, 0, 0, sent=0), Work(1, 0, 0, sent=1), Work(1, 0, 0)),
        edges={(2, 1): Edge(2.0, 1.0)},
    )
    line = simulate(Job(Linear(3), policy_by_name("gpipe"), 4), costs)
    starts = [
        span.start
        for span in line.spans
        if span.task.kind is Kind.BACKWARD and span.task.stage == 1
    ]
    assert starts == [6 + 1 + 2 + number for number in range(4)]


def test_replicas_add_up_their_buckets_and_share_the_network() -> None:
    alone = ran("1f1b", 2, 4, steps=2)
    costs = Costs(reduce=1.0, step=0.5, bucket=4.0, edge=Edge(0.0, 2.0))
    line = simulate(Job(Linear(2), policy_by_name("1f1b"), 4, replicas=2), costs, steps=2)
    assert line.ranks == 4
    assert sum(span.task.kind is Kind.REDUCE for span in line.spans) == 2 * 4
    # Half a bucket to the other replica, the sum of half a bucket back: each takes 1; then the
    # step.
    assert line.makespan == alone.makespan + 1 + 1.0 + 1 + 0.5


def test_under_a_barrier_no_rank_begins_a_step_before_all_have_done_the_one_before() -> None:
    policy, m = policy_by_name("zb-h2"), 8
    line = simulate(Job(Linear(4), policy, m), Costs(), steps=3, barrier=True)
    for step in range(2):
        ends = [
            span.end
            for span in line.spans
            if span.task.microbatch // m == step and span.task.kind is not Kind.STEP
        ]
        begins = [span.start for span in line.computing() if span.task.microbatch // m == step + 1]
        assert max(ends) <= min(begins)
    assert line.makespan == 3 * ran("zb-h2").makespan


def test_an_activation_is_as_large_as_the_stage_before_says() -> None:
    costs = Costs((Work(1, 1, 0, sent=3), Work(1, 1, 0, sent=9)), edges={(0, 1): Edge(0.0, 1.0)})
    line = simulate(Job(Linear(2), policy_by_name("gpipe"), 1), costs)
    assert [span.start for span in line.spans if span.task.kind is Kind.FORWARD] == [0, 1 + 3]


def test_replicas_evaluate_each_to_its_own_end() -> None:
    line = simulate(
        Job(Linear(2), Nested(), 4, trains=False, replicas=2),
        Costs(Work(1, 0, 0), stragglers={0: 3.0}),
    )
    assert sum(span.task.kind is Kind.FORWARD for span in line.spans) == 2 * 2 * 4


def test_idle_time_is_what_no_task_takes_until_the_makespan() -> None:
    line = simulate(
        Job(Linear(3), policy_by_name("zb-h1"), 4, replicas=2),
        Costs(reduce=2.0, step=1.0, edge=Edge(2.0)),
    )
    assert line.idle() == pytest.approx(
        [sum(line.idle(cause)[rank] for cause in (INPUT, ROOM, END)) for rank in range(6)]
    )
    for rank in range(6):
        busy = sum(
            min(span.end, line.makespan) - span.start
            for span in line.spans
            if span.rank == rank and span.start < line.makespan
        )
        assert line.idle()[rank] == pytest.approx(line.makespan - busy)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_one_forward_one_backward_alternates_where_durations_vary(seed: int) -> None:
    """The published order, strictly: the policy is no further from it than a few late tasks."""
    p, m = 4, 8
    rows: list[tuple[Task, ...]] = []
    for rank in range(p):
        ahead = p - rank
        row = [Task(Kind.FORWARD, rank, number) for number in range(ahead)]
        for number in range(m):
            row.append(Task(Kind.BACKWARD, rank, number))
            row += [Task(Kind.FORWARD, rank, number + ahead)] * (number + ahead < m)
        rows.append(tuple(row))
    order, costs = Order(Linear(p), m, tuple(rows)), Costs(jitter=0.5, seed=seed)
    strict = simulate(Job(Linear(p), Fixed(order, order.needs), m), costs, steps=8).makespan
    assert simulate(
        Job(Linear(p), policy_by_name("1f1b"), m), costs, steps=8
    ).makespan == pytest.approx(strict, rel=0.03)


@pytest.mark.parametrize("ranks", [4, 8])
def test_adaptive_overtakes_only_without_room_and_so_is_zb_v_on_a_steady_machine(
    ranks: int,
) -> None:
    """With a message's time and the loop's own; an input gradient that took the last place but one
    cost a forward its turn."""
    costs = Costs(task=0.03, edge=Edge(0.02), pieces=1)
    places = {
        name: placement_for(policy_by_name(name), ranks, 2 * ranks) for name in ("adaptive", "zb-v")
    }
    lines = {
        name: simulate(Job(place, policy_by_name(name), 2 * ranks), costs, steps=8)
        for name, place in places.items()
    }
    assert lines["adaptive"].makespan == lines["zb-v"].makespan
