"""`adaptive` along a plan, against every policy with one pipe, and published figures."""

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axrt.scheduler.job import Job
from axrt.scheduler.order import Order
from axrt.scheduler.placement import Linear, placement_by_name
from axrt.scheduler.planning.longest import Kept
from axrt.scheduler.planning.plan_choice import Trial, job_along_plan
from axrt.scheduler.planning.planner import Effort, World, worlds
from axrt.scheduler.planning.shards import with_shards
from axrt.scheduler.policies import AlongPlan, Fixed, policy_by_name
from axrt.scheduler.simulation.costs import Costs, Edge, Work
from axrt.scheduler.simulation.schedules import build_schedule, options
from axrt.scheduler.simulation.simulator import order_of, simulate
from axrt.scheduler.task import Kind

from ..sweeps import examples, first

STEPS = 8


@pytest.mark.parametrize(
    "costs",
    first(
        [
            Costs(edge=Edge(1.0)),
            Costs(jitter=0.5),
            Costs((Work(1, 1, 1), Work(1, 1, 1), Work(2, 3, 1)) * 2),
            Costs(),
            Costs(stragglers={1: 1.3}),
        ],
        quick=3,
    ),
)
def test_no_policy_that_holds_no_more_is_ahead(costs: Costs) -> None:
    """A small part of `scripts/study_schedules --table beaten`, and uneven stages."""
    placements = ("vee",) if isinstance(costs.work, tuple) else ("linear", "vee")
    job = job_along_plan(worlds(3, costs, placements), 6, 3, effort=Effort(moves=10))
    along = simulate(job, costs, steps=STEPS).makespan
    for option in options(3, 6):
        if option.job.pipes > 1 or (option.job.stages != 6 and isinstance(costs.work, tuple)):
            continue
        line = simulate(option.job, costs, steps=STEPS)
        if max(line.held) * option.job.placement.share <= 3:
            assert along <= 1.003 * line.makespan


@given(
    st.lists(st.tuples(*[st.sampled_from([0.1, 1, 2, 5])] * 3), min_size=3, max_size=3),
    st.sampled_from([0.0, 1.0, 4.0]),
    st.integers(3, 5),
    st.integers(0, 99),
)
@examples(12, quick=6)
def test_plans_end_where_activations_leave_the_device(
    work: list[tuple[float, float, float]], latency: float, places: int, seed: int
) -> None:
    """A weight gradient that comes late in an order keeps the room of the next stash."""
    costs = Costs(tuple(Work(*of) for of in work), edge=Edge(latency), pieces=1, jitter=0.5)
    world, as_in_run = World(Linear(3), costs), partial(replace, held_on_device=places)
    job = job_along_plan([world], 9, 6, as_in_run, effort=Effort(moves=2), trial=Trial(2, 1, 3))
    assert any(map(job.offloads_stash, range(3))) or all(job.held_on(n) <= places for n in range(3))
    for copies in (0.0, 3.0):
        slow = replace(costs, offload=copies, reload=copies, seed=seed)
        line = simulate(job, slow, steps=2)
        assert max(line.held_on_device) <= places or not any(map(job.offloads_stash, range(3)))


@given(
    st.lists(st.tuples(*[st.sampled_from([0.1, 1, 2, 5])] * 3), min_size=4, max_size=4),
    st.sampled_from([0.0, 1.0, 4.0]),
    st.integers(0, 99),
)
@examples(12, quick=6)
def test_plans_end_where_weights_come_and_go(
    work: list[tuple[float, float, float]], latency: float, seed: int
) -> None:
    """A weight gradient that comes late in an order keeps the room of another stage's weights."""
    costs = Costs(tuple(Work(*of) for of in work), edge=Edge(latency), pieces=1, jitter=0.5)

    def in_scratch(job: Job) -> Job:
        return with_shards(replace(job, slots=3), 0, gathered=1, offloads_weights=True)

    world = World(placement_by_name("vee", 2, 0), costs)
    job = job_along_plan([world], 6, 4, in_scratch, effort=Effort(moves=2), trial=Trial(2, 1, 3))
    assert job.residencies
    assert job.residencies.capacity == 1
    for bring in (0.0, 3.0):
        simulate(job, replace(costs, others={Kind.BRING: bring}, seed=seed), steps=3)


def test_a_weight_gradient_behind_work_of_another_stage_is_refused_where_weights_come() -> None:
    late = "F0.0,F3.0,I3.0,I0.0,W3.0,W0.0\nF1.0,F2.0,I2.0,W2.0,I1.0,W1.0\n"
    order = Order.parse(late, "vee")
    assert order.weights_by_residency == (False, True)
    job = Job(order.placement, Fixed(order, order.needs), 1, slots=3)
    with pytest.raises(ValueError, match="gradient of rank 0 comes behind work of another stage"):
        with_shards(job, 0, gathered=1, offloads_weights=True)
    assert with_shards(job, 0, gathered=2, offloads_weights=True).residencies
    free = Order.parse(late.replace("I0.0,W3.0", "W3.0,I0.0"), "vee")
    for of in (
        Fixed(free, free.needs),
        Fixed(order.without_weights(), order.needs),
        AlongPlan(order, order.needs, strict=False),
    ):
        weights = with_shards(replace(job, policy=of), 0, gathered=1, offloads_weights=True)
        simulate(weights, Costs(), steps=3)


def test_no_order_that_goes_with_the_run_is_told() -> None:
    def refused(job: Job) -> Job:
        raise ValueError("it does not")

    with pytest.raises(ValueError, match="no order goes with what else the run has"):
        job_along_plan(worlds(2, Costs(), ("linear",)), 4, 2, refused, effort=Effort(moves=1))


@pytest.mark.parametrize(("held", "least"), first([(4, 0.615), (8, 0.785), (6, 0.727)]))
def test_messages_that_take_as_long_as_a_forward(held: int, least: float) -> None:
    """Four ranks: the best policies reach 0.585, 0.640 and 0.810 there."""
    costs = Costs(edge=Edge(1.0))
    job = job_along_plan(worlds(4, costs, ("linear", "vee")), 8, held, effort=Effort(moves=20))
    line = simulate(job, costs, steps=STEPS)
    assert line.utilisation >= least - 5e-4
    assert max(line.held) * job.placement.share <= held


@pytest.mark.long
@pytest.mark.parametrize(("held", "least"), [(12, 0.67), (8, 0.565), (16, 0.785)])
def test_messages_that_take_as_long_as_a_forward_on_eight_ranks(held: int, least: float) -> None:
    """The best policies without a plan reach 0.536, 0.571 and 0.636 there."""
    costs = Costs(edge=Edge(1.0))
    job = job_along_plan(worlds(8, costs, ("linear", "vee")), 16, held)
    line = simulate(job, costs, steps=STEPS)
    assert line.utilisation >= least
    assert max(line.held) * job.placement.share <= held


PUBLISHED = [  # Tables 5 and 6: microbatches, costs, latency, bubble rate of 1F1B
    (24, Work(18.522, 18.086, 9.337), 0.601, 0.2431),
    (32, Work(18.513, 18.086, 9.331), 0.626, 0.1985),
    (64, Work(18.546, 18.097, 9.321), 0.762, 0.1240),
    (24, Work(29.718, 29.444, 19.927), 0.527, 0.2347),
    (32, Work(29.802, 29.428, 19.530), 0.577, 0.1898),
    (64, Work(29.935, 29.621, 19.388), 0.535, 0.1091),
]


@pytest.mark.parametrize(("microbatches", "work", "latency", "rate"), PUBLISHED)
def test_1f1b_has_its_published_bubble_rate(
    microbatches: int, work: Work, latency: float, rate: float
) -> None:
    job = build_schedule("1f1b", 8, microbatches)
    span = max(simulate(job, Costs(work, edge=Edge(latency))).span)
    assert (span - microbatches * sum(work[:3])) / span == pytest.approx(rate, abs=6e-5)


@pytest.mark.parametrize(
    ("microbatches", "limit", "rate"),
    first([(24, 8, 0.1585), (24, 15, 0.1083), (32, 8, 0.1242)]),
)
def test_published_bubble_rates_of_the_zero_bubble_paper(
    microbatches: int, limit: int, rate: float
) -> None:
    """Tables 5 and 6 of Qi et al., ICLR 2024; all rows by `scripts/study_schedules --table
    zero-bubble`."""
    work = {24: Work(18.522, 18.086, 9.337), 32: Work(18.513, 18.086, 9.331)}[microbatches]
    costs = Costs(work, edge=Edge({24: 0.601, 32: 0.626}[microbatches]), pieces=1)
    kept = Kept(2 * 2304 + 5 * 24 * 1024, 32 * 2304)
    world = World(placement_by_name("linear", 8, 0), costs, (kept,) * 8)
    job = job_along_plan([world], microbatches, limit * sum(kept), effort=Effort(moves=1))
    span = max(simulate(job, costs).span)
    assert (span - microbatches * sum(work[:3])) / span <= rate + 0.001


@given(
    st.integers(1, 4),
    st.integers(1, 7),
    st.sampled_from(["1f1b", "zb-h2", "zb-v", "v-min", "gpipe", "interleaved-zb"]),
    st.floats(0, 1),
    st.integers(0, 3),
    st.booleans(),
    st.integers(0, 9),
)
@examples(60, quick=10)
def test_a_plan_gets_never_stuck_and_keeps_its_bound(
    ranks: int, microbatches: int, name: str, jitter: float, more: int, clips: bool, seed: int
) -> None:
    policy = policy_by_name(name)
    where = placement_by_name(policy.placements[0], ranks, 0)
    many = ranks * microbatches if name == "interleaved-zb" else microbatches
    order = order_of(Job(where, policy, many), Costs(pieces=1)).split()
    costs = Costs(jitter=jitter, edge=Edge(jitter), seed=seed)
    for strict in (True, False):
        along = AlongPlan(order, order.needs, max(order.needs) + more, strict)
        line = simulate(Job(where, along, many, votes=clips), costs, steps=3)
        bounds = [along.bounds(where, rank, many) for rank in range(ranks)]
        assert all(held <= of.held for held, of in zip(line.held, bounds, strict=True))


def test_the_same_seed_gives_the_same_choice() -> None:
    among = worlds(2, Costs(jitter=0.2), ("linear",))
    one, two = (job_along_plan(among, 4, 2, seed=3, effort=Effort(moves=5)) for _ in range(2))
    assert one == two
    assert replace(one, votes=True) != one


def test_too_little_is_refused_with_what_is_enough() -> None:
    with pytest.raises(ValueError, match="limit of 0.5 is too little .* expected 1 or more"):
        job_along_plan(worlds(2, Costs()), 4, 0.5)
