"""What a table of work refuses, and what it asks of rows that count steps."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from axrt.scheduler.job import Job
from axrt.scheduler.policies import placement_for, policy_by_name
from axrt.scheduler.rank_state import RankState
from axrt.scheduler.refusals import IllegalMove
from axrt.scheduler.rules import Feature, Need, Row, StageHere, features_of
from axrt.scheduler.rules.pipeline import pipeline
from axrt.scheduler.rules.replicas import replicas
from axrt.scheduler.rules.row import urgent
from axrt.scheduler.simulation.reader_messages import has_read
from axrt.scheduler.task import Kind, Task


def job() -> Job:
    policy = policy_by_name("1f1b")
    return Job(placement_for(policy, 1, 2), policy, 2)


def state_with(*more: Feature, without: Feature | None = None) -> RankState:
    kept = [feature for feature in features_of(job()) if feature is not without]
    return RankState(job(), 0, features=(*kept, *more))


def test_two_rows_of_one_kind_and_place_are_refused() -> None:
    with pytest.raises(ValueError, match="row F of stage 0 is there twice"):
        state_with(pipeline)


def test_a_need_that_no_row_makes_is_refused() -> None:
    def votes(here: StageHere) -> Iterator[Row]:
        yield Row(Kind.VOTE, (Need(Kind.NORM),), urgent(2))

    with pytest.raises(ValueError, match="row vote of stage 0 needs norm, and no row makes it"):
        state_with(votes)


def test_work_on_microbatches_cannot_count_on_work_on_steps() -> None:
    def recomputes(here: StageHere) -> Iterator[Row]:
        yield Row(Kind.RECOMPUTE, (Need(Kind.STEP, bucket=0),), urgent(2))

    with pytest.raises(ValueError, match="row R of stage 0 counts microbatches and needs step"):
        state_with(recomputes)


def test_a_row_has_a_turn_or_a_level_that_the_policy_orders_within() -> None:
    def recomputes(here: StageHere) -> Iterator[Row]:
        yield Row(Kind.RECOMPUTE, (Need(Kind.FORWARD),))

    with pytest.raises(ValueError, match="row R of stage 0 has a priority and a level, or neither"):
        state_with(recomputes)


def test_what_a_policy_notes_is_forgotten_when_a_task_starts() -> None:
    state = RankState(job(), 0)
    state.ask_step()
    for message in has_read(state.job, 0, 0):
        if state.is_here(message):
            state.deliver(message)
    state.memo["room"] = 1
    state.start(Task(Kind.FORWARD, 0, 0))
    assert not state.memo


def run_to_the_end(state: RankState) -> list[str]:
    ran = []
    while (task := state.pick()) is not None:
        ran.append(str(task))
        state.start(task)
        for message in state.finish(task):
            state.deliver(message)
    return ran


def reads(state: RankState) -> None:
    while (number := state.microbatch_to_read()) is not None:
        for message in has_read(state.job, 0, number):
            state.deliver(message)
        run_to_the_end(state)


def test_work_of_once_a_step_waits_until_it_is_admitted() -> None:
    has_room = False

    def steps(here: StageHere) -> Iterator[Row]:
        for row in replicas(here):
            yield replace(row, admitted=lambda task, view: has_room)

    state = state_with(steps, without=replicas)
    state.ask_step()
    reads(state)
    assert state.pick() is None
    assert [str(lack) for lack in state.waiting_for()] == ["step0.0 lacks room"]
    assert state.why_idle() == "room"
    has_room = True
    assert run_to_the_end(state) == ["step0.0"]
    assert state.finished


def test_a_bucket_that_is_not_there_cannot_be_complete() -> None:
    state = state_with()
    state.ask_step()
    for message in has_read(state.job, 0, 0):
        state.deliver(message)
    forward = Task(Kind.FORWARD, 0, 0)
    with pytest.raises(IllegalMove, match=r"F0.0 cannot complete buckets \[3\]; the stage has 1"):
        state.start(forward, completes=[3])
    assert state.pick() == forward, "nothing was changed"
