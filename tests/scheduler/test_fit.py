"""Costs taken from a timeline are those that it was made with; and what no schedule can beat."""

from dataclasses import astuple, replace
from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axrt.scheduler.job import Job
from axrt.scheduler.lacks import COPIES
from axrt.scheduler.placement import Bidirectional, Linear, Vee
from axrt.scheduler.policies import NAMES, policy_by_name
from axrt.scheduler.simulation.bound import least_makespan
from axrt.scheduler.simulation.cost_table import CostTable, LayerCosts
from axrt.scheduler.simulation.costs import Costs, Edge, Work
from axrt.scheduler.simulation.fit import buckets_of, fit_costs, recut
from axrt.scheduler.simulation.fit_layers import fitted
from axrt.scheduler.simulation.simulator import simulate
from axrt.scheduler.simulation.timeline import Pause, Span, Timeline
from axrt.scheduler.task import Kind, Task

from ..sweeps import examples
from .test_policies import fitting

WORK = (Work(1, 2, 0.5), Work(2, 1, 1), Work(1, 1, 2), Work(1.5, 1, 1))


def test_a_simulated_run_gives_its_costs_back() -> None:
    costs = Costs(WORK, edge=Edge(0.25), step=0.3, recomputed={0: 0.5, 1: 1.0}, pieces=3)
    found = fit_costs(
        simulate(
            Job(Linear(4), policy_by_name("zb-h1"), 8, recomputed={0: 1, 1: 2}), costs, steps=3
        ),
        Linear(4),
    )
    for stage, work in enumerate(WORK):
        assert found.of_stage(Linear(4), stage)[:3] == pytest.approx(work[:3])
    assert (found.edge.latency, found.step, found.pieces, found.task) == pytest.approx(
        (0.25, 0.3, 3, 0.0)
    )
    assert found.recomputed == pytest.approx({0: 0.5, 1: 1.0})
    assert found.jitter == pytest.approx(0.0, abs=1e-6)


def test_whole_backwards_are_halved_and_jitter_is_found() -> None:
    line = simulate(
        Job(Linear(4), policy_by_name("1f1b"), 16), Costs(WORK, jitter=0.3, seed=1), steps=8
    )
    found = fit_costs(line, Linear(4))
    assert found.jitter == pytest.approx(0.3, rel=0.1)
    for stage, work in enumerate(WORK):
        forward, back, weight, _ = found.of_stage(Linear(4), stage)
        assert back == weight
        assert forward == pytest.approx(work.forward, rel=0.15)
        assert back + weight == pytest.approx(work.input + work.weight, rel=0.15)


@pytest.mark.parametrize(("jitter", "lengths"), [(0.1, 0.4), (0.3, 0.3), (0.2, 0.0)])
def test_how_much_microbatches_differ_is_told_from_jitter(jitter: float, lengths: float) -> None:
    costs = Costs(WORK, jitter=jitter, lengths=lengths, seed=3)
    line = simulate(Job(Linear(4), policy_by_name("zb-h1"), 32), costs, steps=8)
    found = fit_costs(line, Linear(4))
    assert (found.jitter, found.lengths) == pytest.approx((jitter, lengths), rel=0.15, abs=0.05)


@pytest.mark.parametrize("name", ["zb-h1", "zb-v", "1f1b"])
def test_a_slow_replica_is_no_length(name: str) -> None:
    policy = policy_by_name(name)
    placement, microbatches = fitting(policy, 4, 8, 2)
    slow = Costs(jitter=0.05, stragglers=dict.fromkeys(range(4, 8), 1.3))
    line = simulate(Job(placement, policy, microbatches, replicas=2), slow, steps=5)
    found = fit_costs(line, placement)
    assert (found.jitter, found.lengths) == pytest.approx((0.05, 0.0), abs=0.02)


def test_a_slow_step_is_no_length() -> None:
    job = Job(Linear(3), policy_by_name("zb-h1"), 6)
    line = simulate(job, Costs(jitter=0.05), steps=5)
    line.spans = [
        span._replace(end=span.end + 0.5 * (span.end - span.start))
        if line.step_of(span.task) == 2
        else span
        for span in line.spans
    ]
    assert fit_costs(line, Linear(3)).lengths < 0.02


def test_layers_of_a_stage_share_what_it_took() -> None:
    one = LayerCosts(1.0, 2.0, 0.0, 8, 0, 0.5, name="one")
    alone = CostTable({2: (one, replace(one, forward_s=3.0), one)}, task_s=9.0)
    costs = Costs((Work(8, 6, 4), Work(5, 5, 5)), task=0.5, jitter=0.2, lengths=0.3, edge=Edge(7))
    table = fitted(alone, 2, costs, [0, 2, 3])
    first, second, third = table.layers[2]
    assert [of[:3] for of in map(astuple, (first, second, third))] == [
        (2.0, 3.0, 2.0),
        (6.0, 3.0, 2.0),
        (5.0, 5.0, 5.0),
    ]
    assert {of.spread for of in table.layers[2]} == {0.2}
    assert (table.lengths, table.task_s, table.edge.latency) == (0.3, 0.5, 7)


def test_chance_is_no_length() -> None:
    job = Job(Linear(2), policy_by_name("zb-h1"), 8)
    lines = [simulate(job, Costs(jitter=0.2, seed=seed), steps=2) for seed in range(12)]
    lengths = sorted(fit_costs(line, Linear(2)).lengths for line in lines)
    assert lengths[9] == 0


def test_the_mean_is_what_is_kept_of_durations_that_vary() -> None:
    line = simulate(Job(Linear(2), policy_by_name("zb-h1"), 16), Costs(jitter=0.5), steps=6)
    found = fit_costs(line, Linear(2))
    taken = [
        span.end - span.start
        for span in line.spans
        if span.task.kind is Kind.FORWARD and span.task.stage == 1
    ]
    variance = found.jitter**2 + found.lengths**2
    assert found.of_stage(Linear(2), 1).forward * exp(variance / 2) == pytest.approx(
        sum(taken) / len(taken)
    )


@pytest.mark.parametrize("name", NAMES)
def test_what_is_fitted_predicts_the_run_it_is_from(name: str) -> None:
    policy = policy_by_name(name)
    placement, microbatches = fitting(policy, 4, 8, 2)
    work = tuple(Work(1 + 0.1 * stage, 1.2, 0.8) for stage in range(placement.stages))
    whole = simulate(
        Job(placement, policy, microbatches), Costs(work, edge=Edge(0.1), step=0.2), steps=4
    ).from_step(1)
    again = simulate(
        Job(placement, policy, microbatches), fit_costs(whole, placement), steps=4
    ).from_step(1)
    assert again.makespan == pytest.approx(whole.makespan, rel=0.02)
    assert again.held == whole.held


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_copies_of_state_are_found_by_direction_and_by_bucket_and_predict_the_run(
    slots: int,
) -> None:
    job, buckets = Job(Linear(4), policy_by_name("1f1b"), 8, slots=slots), (3, 1, 2, 5)
    costs = Costs(WORK, edge=Edge(0.25), step=0.3, state=6.0, copies_in=4.0, copies_out=3.0)
    whole = simulate(job, costs, steps=4, buckets=buckets).from_step(1)
    line = Timeline.from_json(whole.to_json())
    found = fit_costs(line, Linear(4))
    assert buckets_of(line, stages=4) == buckets
    assert (found.step, found.state / found.copies_in, found.state / found.copies_out) == (
        pytest.approx((0.3, 1.5, 2.0))
    )
    assert (found.task, found.edge.latency) == pytest.approx((0.0, 0.25)), (
        "copies beside the tasks are not taken for tasks"
    )
    again = simulate(job, found, steps=4, buckets=buckets).from_step(1)
    assert again.makespan == pytest.approx(whole.makespan)
    assert again.idle() == pytest.approx(whole.idle())
    assert again.idle(COPIES) == pytest.approx(whole.idle(COPIES))
    assert sum(whole.idle(COPIES)) > 0


def test_a_run_without_offload_is_taken_to_have_one_bucket_a_stage() -> None:
    job = Job(Linear(2), policy_by_name("1f1b"), 4)
    line = simulate(job, Costs(step=0.5), steps=2, buckets=3)
    assert (buckets_of(line, stages=2), fit_costs(line, Linear(2)).step) == ((1, 1), 1.5)


def test_the_loop_is_what_lies_between_tasks_and_a_message_what_is_waited_beyond_that() -> None:
    def span(rank: int, text: str, start: float, end: float) -> Span:
        return Span(rank, Task.parse(text), start, end)

    spans = [
        *(
            span(0, "F0.0", 0, 10),
            span(0, "F0.1", 11, 21),
            span(0, "B0.0", 44, 64),
            span(0, "B0.1", 74, 94),
        ),
        *(
            span(1, "F1.0", 13, 23),
            span(1, "B1.0", 24, 41),
            span(1, "F1.1", 42, 52),
            span(1, "B1.1", 53, 71),
        ),
    ]
    pauses = [Pause(0, "input", 21.5, 44), Pause(0, "input", 64.5, 74), Pause(1, "input", 0, 13)]
    found = fit_costs(
        Timeline(2, 2, spans=sorted(spans, key=lambda one: one.start), pauses=pauses), Linear(2)
    )
    assert found.task == 1
    # twice 3 after the end of what was waited for, once 3: F1.0, B0.0, B0.1
    assert found.edge.latency == 3 - 1


def test_steps_are_cut_out_with_their_pauses() -> None:
    line = simulate(
        Job(Linear(2), policy_by_name("1f1b"), 4), Costs(step=1.0, edge=Edge(0.5)), steps=3
    )
    rest = line.from_step(1)
    assert {span.task.microbatch // 4 for span in rest.computing()} == {1, 2}
    assert {span.task.microbatch for span in rest.spans if span.task.kind is Kind.STEP} == {1, 2}
    assert min(span.start for span in rest.spans) == 0
    assert all(pause.start >= 0 and pause.end > pause.start for pause in rest.pauses)
    assert rest.makespan < line.makespan


def test_what_is_done_again_is_not_what_a_rank_must_compute() -> None:
    line = simulate(Job(Linear(2), policy_by_name("gpipe"), 4, recomputed={0: 1, 1: 1}), Costs())
    parts = [
        Timeline(2, 4, spans=[span for span in line.spans if span.rank == rank])
        for rank in range(2)
    ]
    assert Timeline.merged(parts).ideal == line.ideal == 4 * 3


def test_a_timeline_without_a_stage_is_refused() -> None:
    line = simulate(Job(Linear(2), policy_by_name("1f1b"), 4), Costs())
    with pytest.raises(ValueError, match=r"no forwards and backwards of stages \[2, 3\]"):
        fit_costs(line, Vee(2))


@given(st.lists(st.tuples(*[st.floats(0.1, 9)] * 3), min_size=1, max_size=9), st.integers(1, 16))
def test_a_model_cut_otherwise_costs_the_same(
    work: list[tuple[float, float, float]], stages: int
) -> None:
    again = recut([Work(*one) for one in work], stages)
    assert len(again) == stages
    for kind in range(3):
        assert sum(of[kind] for of in again) == pytest.approx(sum(of[kind] for of in work))
    assert recut([Work(*one) for one in work], len(work)) == tuple(
        pytest.approx(Work(*one)) for one in work
    )


@given(
    st.sampled_from(NAMES),
    st.integers(1, 6),
    st.integers(1, 12),
    st.integers(1, 3),
    st.tuples(st.floats(0.1, 3), st.floats(0.1, 3), st.floats(0.1, 3)),
    st.floats(0, 1),
    st.booleans(),
)
@examples(150, quick=25)
def test_no_schedule_beats_the_bound(
    name: str,
    ranks: int,
    microbatches: int,
    steps: int,
    work: tuple[float, float, float],
    latency: float,
    again: bool,
) -> None:
    policy = policy_by_name(name)
    placement, microbatches = fitting(policy, ranks, microbatches, 2)
    costs = Costs(
        Work(*work),
        edge=Edge(latency),
        recomputed=dict.fromkeys(range(placement.stages), 0.5) if again else {},
    )
    assert (
        simulate(
            Job(placement, policy, microbatches, recomputed=dict.fromkeys(costs.recomputed, 1)),
            costs,
            steps=steps,
        ).makespan
        >= least_makespan(placement, costs, microbatches, steps) - 1e-9
    )


def test_the_bound_is_met_where_nothing_can_be_better() -> None:
    assert (
        least_makespan(Linear(1), Costs(), 8)
        == 24
        == simulate(Job(Linear(1), policy_by_name("1f1b"), 8), Costs()).makespan
    )
    assert least_makespan(Vee(4), Costs(), 8) == 24 + 1.5  # rank 3 waits for three half forwards
    assert least_makespan(Bidirectional(4), Costs(), 8) == 25  # ranks 1 and 2 wait for one forward
    assert simulate(Job(Bidirectional(4), policy_by_name("dualpipe"), 8), Costs()).makespan == 25


def test_the_bound_counts_the_way_there_and_back_and_slow_ranks() -> None:
    costs = Costs(Work(1, 1, 0.1), edge=Edge(0.5))
    # of the last rank
    assert least_makespan(Linear(3), costs, 1) == (2 + 2 * 0.5) + 2 + (2 + 2 * 0.5)
    assert least_makespan(Linear(2), Costs(stragglers={0: 0.5, 1: 0.5}), 4) == 0.5 * least_makespan(
        Linear(2), Costs(), 4
    )
