"""A kind of work that axrt does not have, added in this file alone: a pause before a bucket
steps."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from random import Random

import pytest

from axrt.scheduler.bucket import copies_by_pipe
from axrt.scheduler.job import Job
from axrt.scheduler.policies import placement_for, policy_by_name
from axrt.scheduler.rank_state import RankState
from axrt.scheduler.rules import Feature, Need, Queue, Row, StageHere, features_of
from axrt.scheduler.rules.replicas import losses_of_all, replicas, whole
from axrt.scheduler.rules.row import urgent
from axrt.scheduler.simulation.costs import Costs
from axrt.scheduler.simulation.reader_messages import has_read
from axrt.scheduler.simulation.simulator import simulate
from axrt.scheduler.simulation.timeline import Timeline
from axrt.scheduler.task import AnyKind, Counts, Kind, Part, Task

from .pipelines import Pipeline, run_in_random_order


class Ours(AnyKind):
    PAUSE = "pause", "a pause before a step", Counts.STEPS, Part.BUCKET


class Beside(Queue):
    PAUSES = "pauses"


def paused(here: StageHere) -> Iterator[Row]:
    """Between a bucket being whole and its step, on a queue of its own."""
    for row in replicas(here):
        if row.kind is not Kind.STEP:
            yield row
            continue
        assert row.bucket is not None
        needs = (whole(here, row.bucket), losses_of_all(here))
        yield Row(Ours.PAUSE, needs, urgent(0), bucket=row.bucket, queue=Beside.PAUSES)
        yield replace(row, needs=(*row.needs, Need(Ours.PAUSE, bucket=row.bucket)))


def features(job: Job) -> list[Feature]:
    return [paused if feature is replicas else feature for feature in features_of(job)]


def ran(pause: float, microbatches: int = 4, copies: int = 1, steps: int = 2) -> Timeline:
    policy = policy_by_name("1f1b")
    job = Job(placement_for(policy, 2, microbatches), policy, microbatches, copies)
    return simulate(job, Costs(others={Ours.PAUSE: pause}), steps=steps, features=features(job))


def test_a_pause_keeps_its_own_steps_waiting_and_nothing_else() -> None:
    line = ran(pause=5.0)
    when = {str(span.task): (span.start, span.end) for span in line.spans}
    for stage, step in product(range(2), range(2)):
        assert when[f"pause{stage}.{step}"][1] <= when[f"step{stage}.{step}"][0]
        assert when[f"pause{stage}.{step}"][1] - when[f"pause{stage}.{step}"][0] == 5.0
    assert line.makespan == ran(pause=0.0).makespan + 5.0, "the second step's weights come later"
    assert max(span.end for span in line.spans) == line.makespan + 5.0
    assert str(Task(Ours.PAUSE, 1, 3)) == "pause1.3"


def test_a_pause_runs_beside_the_work_of_another_bucket() -> None:
    policy = policy_by_name("1f1b")
    job = Job(placement_for(policy, 1, 1), policy, 1)
    two = {0: [copies_by_pipe(0, bucket, 1) for bucket in range(2)]}
    state = RankState(job, 0, buckets=two, features=features(job))
    assert {queue.value for queue in state.queues} == {"compute", "pauses"}
    state.ask_step()
    _through_a_microbatch(state)
    assert str(state.pick(Beside.PAUSES)) == "pause0.0"
    first = state.pick(Beside.PAUSES)
    assert first is not None
    state.start(first)
    assert str(state.pick(Beside.PAUSES)) == "pause0.0/1"
    assert state.pick() is None, (
        "a step waits for the end of its pause, which runs on another queue"
    )
    state.finish(first)
    assert str(state.pick()) == "step0.0"
    assert [str(lack) for lack in state.waiting_for()] == ["step0.0/1 lacks pause"]


def _through_a_microbatch(state: RankState) -> None:
    for message in has_read(state.job, 0, 0):
        state.deliver(message)
    while (task := state.pick()) is not None:
        state.start(task)
        for message in state.finish(task):
            if state.is_here(message):
                state.deliver(message)


@pytest.mark.parametrize("seed", range(20))
def test_it_ends_in_any_order_of_events(seed: int) -> None:
    random = Random(seed)
    name = random.choice(["1f1b", "zb-v", "gpipe", "adaptive", "breadth-first"])
    pipeline = Pipeline(
        policy_by_name(name),
        2,
        4,
        steps=2,
        replicas=1 + seed % 3,
        clips=seed % 2 == 0,
        buckets=2,
        features=features,
    )
    run_in_random_order(pipeline, seed)
    assert pipeline.finished
    for ran_here in pipeline.ran:
        assert (
            sum(task.kind is Ours.PAUSE for task in ran_here)
            == sum(task.kind is Kind.STEP for task in ran_here)
            > 0
        )
