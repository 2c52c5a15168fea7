"""Orders that are given: read, refused, and followed."""

from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axrt.scheduler.job import Job
from axrt.scheduler.order import Order
from axrt.scheduler.placement import Looped, Vee
from axrt.scheduler.policies import NAMES, Fixed, placement_for, policy_by_name
from axrt.scheduler.simulation.costs import Costs
from axrt.scheduler.simulation.simulator import order_of, simulate
from axrt.scheduler.task import Kind, Task

from ..sweeps import examples
from .pipelines import Pipeline, run_in_random_order
from .test_policies import fitting


def order(text: str, placement: str = "") -> Order:
    return Order.parse(dedent(text), placement)


def followed(of: Order) -> Fixed:
    """Strictly."""
    return Fixed(of, of.needs)


def ran(policy: Fixed, microbatches: int) -> list[list[str]]:
    """What each rank ran in one step, weight gradients by their last pieces."""
    line = simulate(Job(policy.order.placement, policy, microbatches), Costs(pieces=1))
    ranks = range(policy.order.placement.ranks)
    return [
        [
            str(span.task)
            for span in line.spans
            if span.rank == rank and span.task.kind.of_a_microbatch
        ]
        for rank in ranks
    ]


def test_what_runs_is_what_was_written() -> None:
    text = """
        # as few in flight as may be
        F0.0,B0.0,F0.1,B0.1
        F1.0, B1.0, F1.1, B1.1
    """
    policy = followed(order(text))
    assert ran(policy, 2) == [["F0.0", "B0.0", "F0.1", "B0.1"], ["F1.0", "B1.0", "F1.1", "B1.1"]]
    assert (policy.splits, policy.placements, policy.needs) == (False, ("linear",), (1, 1))


def test_weight_gradients_that_are_left_out_go_where_there_is_time() -> None:
    policy = followed(order("F0.0,F0.1,I0.0,I0.1\nF1.0,I1.0,F1.1,I1.1"))
    assert policy.splits
    assert sorted(ran(policy, 2)[0]) == ["F0.0", "F0.1", "I0.0", "I0.1", "W0.0", "W0.1"]
    late = followed(order("F0.0,F0.1,I0.0,I0.1,W0.0,W0.1\nF1.0,I1.0,F1.1,I1.1,W1.0,W1.1"))
    assert ran(late, 2) == [
        ["F0.0", "F0.1", "I0.0", "I0.1", "W0.0", "W0.1"],
        ["F1.0", "I1.0", "F1.1", "I1.1", "W1.0", "W1.1"],
    ]


def test_the_placement_is_that_in_which_every_rank_holds_its_tasks() -> None:
    assert order("F0.0,F3.0,B3.0,B0.0\nF1.0,F2.0,B2.0,B1.0").placement == Vee(2)
    assert order("F0.0,F2.0,B2.0,B0.0\nF1.0,F3.0,B3.0,B1.0").placement == Looped(2, 2)
    with pytest.raises(ValueError, match="do not fit placement vee"):
        order("F0.0,F2.0,B2.0,B0.0\nF1.0,F3.0,B3.0,B1.0", "vee")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# nothing", "the order is empty"),
        ("F0.0,B0.0\nF1.0,X1.0", "line 2: 'X1.0' is not a task"),
        ("F0.0,step0.0", "line 1: step0.0; expected forwards"),
        (
            "F0.0,F0.1,B0.1,B0.0",
            "line 1: B0.1 comes before B0.0; expected each microbatch once, in order",
        ),
        ("B0.0,F0.0", "line 1: B0.0 stands before F0.0; expected it after"),
        ("F0.0,W0.0,I0.0", "line 1: W0.0 stands before I0.0"),
        ("F0.0,F0.1,B0.0,B0.1\nF1.0,B1.0", "line 2 ends without F1.1; there are 2 microbatches"),
        ("F0.0,I0.0,F0.1,I0.1,W0.0", "line 1 ends without W0.1"),
        ("F0.0,F0.1", "line 1 ends without B0.0"),
        ("F0.0,B0.0\nF1.0,I1.0", "some backwards are whole"),
        ("F0.0,F0.1,B0.0,B0.0", "line 1: B0.0 stands there twice"),
        ("F0.0,B0.0\nF2.0,B2.0", "do not fit any placement"),
    ],
)
def test_what_is_no_order_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        order(text)


def test_an_order_that_sticks_is_found_by_simulating_it() -> None:
    """Rank 0 wants the gradient of what it will only send afterwards."""
    policy = followed(order("F0.0,B0.0,F0.1,B0.1\nF1.0,F1.1,B1.0,B1.1"))
    with pytest.raises(
        RuntimeError, match="the schedule is stuck: .*B0.0 lacks gradient from rank 1"
    ):
        ran(policy, 2)


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_a_policy_is_as_good_as_the_policy(name: str) -> None:
    """And so every published row is met by a file."""
    rule, m = policy_by_name(name), 8
    placement = placement_for(rule, 4, m)
    given = order_of(Job(placement, rule, m))
    assert Order.parse(str(given), placement.name, placement.chunks) == given
    fixed, free = (
        simulate(Job(placement, policy, m), Costs(pieces=1)) for policy in (followed(given), rule)
    )
    assert (fixed.makespan, fixed.span, fixed.in_flight, fixed.held) == (
        free.makespan,
        free.span,
        free.in_flight,
        free.held,
    )


def test_a_pipe_may_run_a_whole_step_before_the_other() -> None:
    """The reader on the other pipe's first rank is no hindrance."""
    # of each rank, first a stage of pipe 1, then one of pipe 0
    lanes = (
        ((1, 1), (0, 0)),
        ((0, 1), (1, 0)),
    )
    rows = [
        [
            f"{kind}{stage}.{n}"
            for stage, pipe in of_rank
            for kind in "FB"
            for n in range(pipe, 16, 2)
        ]
        for of_rank in lanes
    ]
    turns = Order.parse("".join(",".join(row) + "\n" for row in rows))
    assert turns.placement.name == "bidirectional"
    assert simulate(Job(turns.placement, followed(turns), 16), Costs()).makespan >= 48


def test_what_is_done_again_is_no_part_of_an_order() -> None:
    with pytest.raises(ValueError, match=r"line 1: R0.0; expected forwards"):
        Order.parse("F0.0,R0.0,B0.0")


@examples(80, quick=20)
@given(
    st.sampled_from(NAMES),
    st.integers(1, 6),
    st.integers(1, 12),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 4),
    st.integers(),
)
def test_an_order_as_a_plan_ends_under_any_order_of_events_and_keeps_its_cap(
    name: str, ranks: int, microbatches: int, chunks: int, steps: int, room: int, seed: int
) -> None:
    rule = policy_by_name(name)
    placement, microbatches = fitting(rule, ranks, microbatches, chunks)
    plan = order_of(Job(placement, rule, microbatches))
    floating = plan.without_weights()
    with_slack = Fixed(floating, plan.needs, max(plan.needs) + room, strict=False)
    for policy in (followed(plan), with_slack, followed(floating)):
        pipeline = Pipeline(policy, placement.ranks, microbatches, steps=steps, placement=placement)
        run_in_random_order(pipeline, seed)
        assert pipeline.finished, [
            str(lack) for state in pipeline.states for lack in state.waiting_for()
        ]
        for state, stash in zip(pipeline.states, pipeline.stash, strict=True):
            assert stash.held <= policy.bounds(placement, state.rank, microbatches).held


def test_running_ahead_of_an_order_pays_where_things_vary() -> None:
    rule = policy_by_name("zb-h2")
    placement = placement_for(rule, 4, 16)
    whole = order_of(Job(placement, rule, 16))
    plan = whole.without_weights()
    costs = Costs(jitter=0.5, seed=3)
    strict, free = (
        simulate(Job(placement, Fixed(plan, whole.needs, 12, strict), 16), costs, steps=4).makespan
        for strict in (True, False)
    )
    assert free < strict


def test_tasks_of_an_order_are_those_of_the_notation() -> None:
    assert order("F0.0,B0.0").rows == ((Task(Kind.FORWARD, 0, 0), Task(Kind.BACKWARD, 0, 0)),)


def test_what_a_spreadsheet_writes_is_read() -> None:
    assert order('"F0.0","B0.0",,\r\nF1.0,B1.0,,\r\n').rows == order("F0.0,B0.0\nF1.0,B1.0").rows


def test_a_rank_whose_line_leaves_weight_gradients_out_needs_room_for_what_is_in_flight() -> None:
    assert order("F0.0,I0.0,F0.1,I0.1\nF1.0,F1.1,I1.0,W1.0,I1.1,W1.1").needs == (1, 2)


@pytest.mark.parametrize("name", NAMES)
def test_a_policys_order_as_a_plan_is_hardly_worse_than_the_policy_on_a_steady_machine(
    name: str,
) -> None:
    rule = policy_by_name(name)
    placement = placement_for(rule, 8, 16)
    plan = order_of(Job(placement, rule, 16))
    free = simulate(Job(placement, rule, 16), Costs(), steps=4).makespan
    assert (
        simulate(
            Job(placement, Fixed(plan.without_weights(), plan.needs, strict=False), 16),
            Costs(),
            steps=4,
        ).makespan
        <= 1.02 * free
    )
