"""Plans from costs, against optima that were proved (OR-tools CP-SAT, see docs/schedules.md)."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axrt.scheduler.job import Job
from axrt.scheduler.placement import placement_by_name
from axrt.scheduler.planning.annealing import annealed
from axrt.scheduler.planning.list_schedule import list_schedule
from axrt.scheduler.planning.longest import Kept, longest_path
from axrt.scheduler.planning.plan_choice import Trial, job_along_plan, takes
from axrt.scheduler.planning.planner import Effort, World, planned, worlds
from axrt.scheduler.policies import Fixed
from axrt.scheduler.simulation.costs import Costs, Edge, Work
from axrt.scheduler.simulation.simulator import simulate
from axrt.scheduler.task import Kind, Task

from ..sweeps import examples
from .exact import shortest

AT_LATENCY_1 = Costs(edge=Edge(1.0), pieces=1)
QUICK = Effort(moves=50)
LINEAR_OR_VEE = ("linear", "vee")
PROVED = [  # ranks, microbatches, held, optimum over linear and vee: F = I = W = 1 a rank
    *((2, 4, held, takes) for held, takes in ((2, 17), (3, 14), (4, 13.5))),
    *((3, 6, held, takes) for held, takes in ((3, 28), (4, 25), (6, 22))),
    *((4, 8, held, takes) for held, takes in ((4, 39), (6, 33), (8, 30))),
]


def test_layers_that_take_no_time_are_planned() -> None:
    nothing = Costs(Work(0, 0, 0), edge=Edge(1.0))
    plan = planned(worlds(2, nothing), 4, 2, effort=Effort(moves=20))
    assert plan.takes == 4.0, "there and back, for two microbatches at a time"


@pytest.mark.parametrize(("ranks", "microbatches", "held", "takes"), PROVED)
def test_a_plan_is_the_proved_optimum(
    ranks: int, microbatches: int, held: int, takes: float
) -> None:
    plan = planned(worlds(ranks, AT_LATENCY_1, LINEAR_OR_VEE), microbatches, held, effort=QUICK)
    assert plan.takes == takes
    assert max(plan.order.needs) * plan.order.placement.share <= held


@pytest.mark.exact
@pytest.mark.parametrize("placement", LINEAR_OR_VEE)
@pytest.mark.parametrize(("ranks", "microbatches", "held", "takes"), PROVED)
def test_no_order_is_shorter_than_the_optimum(
    ranks: int, microbatches: int, held: int, takes: float, placement: str
) -> None:
    """The optimum over both placements, proved by a solver."""
    (world,) = worlds(ranks, AT_LATENCY_1, (placement,))
    plan = planned([world], microbatches, held, effort=QUICK)
    assert shortest(world.graph(microbatches), held, plan.takes, 0.5, 300) >= takes


@pytest.mark.exact
@pytest.mark.parametrize(("held", "takes"), [(8, 83), (12, 71), (16, 62)])
def test_no_order_of_eight_ranks_is_shorter_on_linear(held: int, takes: float) -> None:
    (world,) = worlds(8, AT_LATENCY_1, ("linear",))
    plan = planned([world], 16, held, effort=QUICK)
    assert shortest(world.graph(16), held, plan.takes, 0.5, 600) >= takes


@pytest.mark.exact
@pytest.mark.parametrize(("ranks", "placement"), [(2, "vee"), (3, "linear"), (3, "vee")])
def test_a_plan_is_within_two_percent_of_what_a_solver_finds(ranks: int, placement: str) -> None:
    costs = Costs(Work(1, 2, 1), edge=Edge(0.5), pieces=1)
    (world,) = worlds(ranks, costs, (placement,))
    plan = planned([world], 2 * ranks, ranks + 1, effort=QUICK)
    found = shortest(world.graph(2 * ranks), ranks + 1, plan.takes, 0.5, 300)
    assert found <= plan.takes <= 1.02 * found


@pytest.mark.sweep  # two to four ranks are planned at their optimum above
@pytest.mark.parametrize(("held", "takes"), [(12, 71), (8, 83), (16, 62)])
def test_eight_ranks_are_within_two_percent_of_the_optimum(held: int, takes: float) -> None:
    assert (
        planned(worlds(8, AT_LATENCY_1, LINEAR_OR_VEE), 16, held, effort=QUICK).takes
        <= 1.02 * takes
    )


@pytest.mark.parametrize(("ranks", "takes"), [(2, 12.5), (3, 19), (4, 25.5)])
def test_without_latency_it_is_zb_v(ranks: int, takes: float) -> None:
    assert planned(worlds(ranks, Costs(pieces=1)), 2 * ranks, ranks).takes == takes


def test_a_plan_that_is_followed_takes_as_long_as_it_says() -> None:
    """By the simulator, whose brains know nothing of longest paths."""
    work = tuple(Work(1 + stage / 4, 1.5, 0.5 + stage / 8, sent=0.2) for stage in range(4))
    costs = Costs(work, edge=Edge(0.3, 2.0), pieces=1)
    plan = planned(worlds(4, costs, ("linear",)), 8, 5)
    job = Job(plan.order.placement, Fixed(plan.order, plan.order.needs), 8)
    assert simulate(job, costs).makespan == pytest.approx(plan.takes)


def test_the_same_seed_gives_the_same_plan() -> None:
    one, two = (planned(worlds(3, AT_LATENCY_1), 6, 4, seed=7, effort=QUICK) for _ in range(2))
    assert one == two


@pytest.mark.parametrize("placement", LINEAR_OR_VEE)
def test_stages_that_keep_nothing_or_take_no_time_are_planned_for(placement: str) -> None:
    where = placement_by_name(placement, 3, 0)
    for keeps in (0.0, 1.0):  # by the stages between the ends, which only reshape
        work = tuple(Work(*[float(stage != 1)] * 3) for stage in range(where.stages))
        kept = tuple(Kept(0.0, float(stage != 1) * keeps) for stage in range(where.stages))
        world = World(where, Costs(work, edge=Edge(1.0)), kept)
        plan = planned([world], 6, 4 * keeps, effort=QUICK)
        rows = world.graph(6).rows(plan.order)
        assert max(map(world.graph(6).most_kept, rows)) <= 4 * keeps
        job = job_along_plan(
            [world], 6, 4 * keeps, effort=QUICK, trial=Trial(steps=3, seeds=1, orders=4)
        )
        assert takes(job, world, 1, [0]) > 0


def test_too_little_memory_is_refused_with_what_is_enough() -> None:
    with pytest.raises(ValueError, match=r"limit of 0.5 .* on 3 ranks; expected 1 or more"):
        planned(worlds(3, AT_LATENCY_1), 6, 0.5)


@given(
    st.integers(1, 4),
    st.integers(1, 6),
    st.sampled_from(["linear", "vee", "looped"]),
    st.floats(0, 2),
    st.integers(0, 3),
    st.integers(1, 2),
    st.integers(),
)
@examples(40, quick=8)
def test_changes_keep_an_order_that_can_be_followed_and_keeps_no_more(
    ranks: int, microbatches: int, name: str, latency: float, more: int, steps: int, seed: int
) -> None:
    placement, random = placement_by_name(name, ranks, 0), Random(seed)
    stages = range(placement.stages)
    work = tuple(Work(*(random.choice((0.5, 1, 2)) for _ in range(3))) for _ in stages)
    kept = tuple(Kept(random.choice((0, 2, 5)), random.choice((1, 3))) for _ in stages)
    world = World(placement, Costs(work, edge=Edge(latency), pieces=1), kept)
    graph = world.graph(microbatches)
    limit = world.least + 8 * more
    rows = list_schedule(graph, limit)
    found, takes = annealed(graph, rows, limit, 200, seed, steps)
    assert takes <= longest_path(graph, rows, steps).takes
    order = graph.order(found)
    assert all(peak(row, kept) <= limit for row in order.rows)
    job = Job(placement, Fixed(order, order.needs), microbatches)
    assert simulate(job, world.costs, steps=steps).makespan == pytest.approx(takes)


def peak(row: tuple[Task, ...], kept: tuple[Kept, ...]) -> float:
    """The most that a rank keeps, counted here once more."""
    most = now = 0.0
    for kind, stage, *_ in row:
        until_input, until_weight = kept[stage]
        now += (until_input + until_weight) * (kind is Kind.FORWARD)
        most = max(most, now)
        now -= until_input * (kind is Kind.INPUT) + until_weight * (kind is Kind.WEIGHT)
    return most


def test_less_than_the_least_is_refused_and_the_least_will_do() -> None:
    kept = (Kept(3, 2), Kept(1, 1), Kept(4, 0), Kept(0, 5))
    world = World(placement_by_name("vee", 2, 0), AT_LATENCY_1, kept)
    with pytest.raises(ValueError, match="limit of 9 is too little .* expected 10 or more"):
        planned([world], 4, 9)
    plan = planned([world], 4, 10)
    assert max(peak(row, kept) for row in plan.order.rows) == 10


def test_steps_that_follow_each_other_are_planned_as_such() -> None:
    """A step may begin on the first rank while the last ones are not done with the one before."""
    among = worlds(4, Costs(pieces=1), ("vee",))
    one, eight = (planned(among, 8, 4, steps, effort=QUICK) for steps in (1, 8))
    found = [
        simulate(
            Job(plan.order.placement, Fixed(plan.order, plan.order.needs), 8),
            Costs(pieces=1),
            steps=8,
        ).makespan
        for plan in (one, eight)
    ]
    assert found[1] == pytest.approx(eight.takes)
    assert found[1] < found[0]
