"""Plans from costs, against optima that were proved (OR-tools CP-SAT, see docs/schedules.md)."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axrt.scheduler.annealing import annealed
from axrt.scheduler.job import Job
from axrt.scheduler.list_schedule import list_schedule
from axrt.scheduler.longest import Graph, longest_path
from axrt.scheduler.placement import placement_by_name
from axrt.scheduler.planner import planned
from axrt.scheduler.policies import Fixed
from axrt.scheduler.simulator import Costs, Edge, Work, simulate

from ..sweeps import examples

AT_LATENCY_1 = Costs(edge=Edge(1.0), pieces=1)
PROVED = [  # ranks, microbatches, held, optimum over linear and vee: F = I = W = 1 a rank
    *((2, 4, held, takes) for held, takes in ((2, 17), (3, 14), (4, 13.5))),
    *((3, 6, held, takes) for held, takes in ((3, 28), (4, 25), (6, 22))),
    *((4, 8, held, takes) for held, takes in ((4, 39), (6, 33), (8, 30))),
]


@pytest.mark.parametrize(("ranks", "microbatches", "held", "takes"), PROVED)
def test_a_plan_is_the_proved_optimum(
    ranks: int, microbatches: int, held: int, takes: float
) -> None:
    plan = planned(ranks, microbatches, AT_LATENCY_1, held)
    assert plan.takes == takes
    assert max(plan.order.needs) * plan.order.placement.share <= held


@pytest.mark.parametrize(("held", "takes"), [(8, 83), (12, 71), (16, 62)])
def test_eight_ranks_are_within_two_percent_of_the_optimum(held: int, takes: float) -> None:
    assert planned(8, 16, AT_LATENCY_1, held, ("linear",)).takes <= 1.02 * takes


@pytest.mark.parametrize(("ranks", "takes"), [(2, 12.5), (3, 19), (4, 25.5)])
def test_without_latency_it_is_zb_v(ranks: int, takes: float) -> None:
    assert planned(ranks, 2 * ranks, Costs(pieces=1), ranks).takes == takes


def test_a_plan_that_is_followed_takes_as_long_as_it_says() -> None:
    """By the simulator, whose brains know nothing of longest paths."""
    work = tuple(Work(1 + stage / 4, 1.5, 0.5 + stage / 8, sent=0.2) for stage in range(4))
    costs = Costs(work, edge=Edge(0.3, 2.0), pieces=1)
    plan = planned(4, 8, costs, 5, ("linear",))
    job = Job(plan.order.placement, Fixed(plan.order, plan.order.needs), 8)
    assert simulate(job, costs).makespan == pytest.approx(plan.takes)


def test_the_same_seed_gives_the_same_plan() -> None:
    one, two = (planned(3, 6, AT_LATENCY_1, 4, seed=7) for _ in range(2))
    assert one == two


def test_too_little_memory_is_refused_with_what_is_enough() -> None:
    with pytest.raises(ValueError, match=r"most_held = 0.5 .* on 3 ranks; expected 1 or more"):
        planned(3, 6, AT_LATENCY_1, 0.5)


@given(
    st.integers(1, 4),
    st.integers(1, 6),
    st.sampled_from(["linear", "vee", "looped"]),
    st.floats(0, 2),
    st.integers(0, 3),
    st.integers(),
)
@examples(40, quick=15)
def test_changes_keep_an_order_that_can_be_followed_and_holds_no_more(
    ranks: int, microbatches: int, name: str, latency: float, more: int, seed: int
) -> None:
    placement, random = placement_by_name(name, ranks, 0), Random(seed)
    work = tuple(
        Work(*(random.choice((0.5, 1, 2)) for _ in range(3))) for _ in range(placement.stages)
    )
    costs = Costs(work, edge=Edge(latency), pieces=1)
    graph = Graph.of(placement, costs, microbatches)
    held = [placement.chunks + more] * ranks
    rows = list_schedule(graph, held)
    found, takes = annealed(graph, rows, held, 200, seed)
    assert takes <= longest_path(graph, rows).takes
    order = graph.order(found)
    assert all(needs <= most for needs, most in zip(order.needs, held, strict=True))
    job = Job(placement, Fixed(order, order.needs), microbatches)
    assert simulate(job, costs).makespan == pytest.approx(takes)
