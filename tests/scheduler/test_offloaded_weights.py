"""Weights in scratch: the moves of a rank, what holds in any order of events, and the time that
they take."""

from dataclasses import replace

import pytest

from axrt.scheduler.bucket import copies_by_pipe
from axrt.scheduler.job import Job
from axrt.scheduler.placement import Looped
from axrt.scheduler.planning.residency_planner import plan_residencies
from axrt.scheduler.policies import NAMES, policy_by_name
from axrt.scheduler.rank_state import RankState
from axrt.scheduler.refusals import IllegalMove
from axrt.scheduler.simulation.costs import Costs, Work
from axrt.scheduler.simulation.simulator import simulate
from axrt.scheduler.task import Kind, Task

from ..sweeps import fewer
from . import pipelines
from .pipelines import Pipeline, run_in_random_order
from .test_offload import COMPUTE, IN, OUT, finish, lacks, run, start


def job_of(stages: int, room: int, microbatches: int = 1, clips: bool = False) -> Job:
    """One rank with some stages, which takes all microbatches through each."""
    job = Job(
        Looped(1, stages), policy_by_name("breadth-first"), microbatches, votes=clips, slots=3
    )
    return replace(job, residencies=plan_residencies(job, room), offloads_weights=True)


def state_of(job: Job, buckets: int = 1) -> RankState:
    copies = {
        stage: [copies_by_pipe(stage, bucket, 1) for bucket in range(buckets)]
        for stage in range(job.stages)
    }
    state = RankState(job, 0, buckets=copies)
    state.ask_step()
    return state


def read(state: RankState) -> None:
    for message in pipelines.read(state):
        state.deliver(message)


def test_weights_come_one_stage_ahead_and_go_when_another_needs_the_room() -> None:
    state = state_of(job_of(stages=3, room=2))
    read(state)
    assert state.pick(COMPUTE) is None
    assert state.why_idle() == "copies"
    run(state, IN, "bring0.0")
    start(state, IN, "bring1.0")
    run(state, COMPUTE, "F0.0")
    assert state.pick(COMPUTE) is not None, "the room of stage 0 is free"
    with pytest.raises(IllegalMove, match=r"no place for whole weights is free"):
        state.start(Task.parse("bring2.0"))
    run(state, COMPUTE, "release0.0")
    finish(state, "bring1.0")
    start(state, IN, "bring2.0")


def test_a_residency_out_of_its_order_is_refused() -> None:
    state = state_of(job_of(stages=3, room=2))
    read(state)
    with pytest.raises(IllegalMove, match=r"bring1\.0 cannot start: another comes first"):
        state.start(Task.parse("bring1.0"))
    start(state, IN, "bring0.0")
    start(state, IN, "bring1.0")


def test_the_last_residency_of_a_step_lasts_until_its_stage_has_stepped() -> None:
    state = state_of(job_of(stages=2, room=1))
    read(state)
    for queue, task in (
        *((IN, "bring0.0"), (COMPUTE, "F0.0"), (COMPUTE, "release0.0"), (IN, "bring1.0")),
        *((COMPUTE, "F1.0"), (COMPUTE, "B1.0")),
    ):
        run(state, queue, task)
    assert state.pick(COMPUTE) is None
    assert "bring0.1 lacks a place for whole weights" in lacks(state)
    run(state, IN, "fetch1.0")
    run(state, COMPUTE, "step1.0")
    assert state.pick(COMPUTE) is None
    run(state, OUT, "store1.0")
    run(state, COMPUTE, "release1.0")
    run(state, IN, "bring0.1")
    run(state, COMPUTE, "B0.0")


def test_where_steps_wait_for_a_vote_the_last_residency_does_not_last() -> None:
    state = state_of(job_of(stages=2, room=1, clips=True))
    read(state)
    for queue, task in (
        *((IN, "bring0.0"), (COMPUTE, "F0.0"), (COMPUTE, "release0.0"), (IN, "bring1.0")),
        *((COMPUTE, "F1.0"), (COMPUTE, "B1.0"), (COMPUTE, "release1.0"), (IN, "bring0.1")),
        *((COMPUTE, "norm1.0"), (COMPUTE, "B0.0")),
    ):
        run(state, queue, task)


@pytest.mark.parametrize("name", NAMES)
def test_in_any_order_of_events_nobody_gets_stuck(name: str) -> None:
    """`SlotWatch` looks at every task."""
    for seed in range(fewer(24, quick=5)):
        pipeline = Pipeline(
            policy_by_name(name),
            *(2, 4),
            steps=3,
            buckets=1 + seed % 3,
            replicas=1 + seed % 2,
            clips=seed % 3 == 0,
            slots=1 + seed % 4,
            shards=seed % 4 > 1,
            room=1 + seed // 2 % 3,
            brings=True,
            tied=seed % 5 == 0,
            recomputes=[0, 1] if seed % 7 == 0 else [],
        )
        run_in_random_order(pipeline, seed)
        assert all(state.finished and state.settled for state in pipeline.states)


def test_a_stage_that_computes_as_long_as_the_next_one_comes_hides_its_copies() -> None:
    stages, microbatches = 6, 4
    job = job_of(stages, room=2, microbatches=microbatches)
    costs = Costs(Work(stages, stages, stages), others={Kind.BRING: 4.0})
    line = simulate(job, costs)
    free = simulate(job, replace(costs, others={}))
    assert line.makespan == free.makespan + 4.0, "the first one alone"


def test_a_step_of_which_nothing_is_hidden_takes_what_its_copies_take() -> None:
    stages = 6
    job = job_of(stages, room=2)
    line = simulate(job, Costs(Work(0, 0, 0), others={Kind.BRING: 4.0}))
    # Forwards bring every stage, and backwards all but the two that are still there.
    assert line.makespan == (2 * stages - 2) * 4.0
