"""Gradients of matrices become changes before steps are voted on."""

from collections.abc import Iterator
from dataclasses import replace as with_

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axrt.scheduler.job import Job
from axrt.scheduler.policies import placement_for, policy_by_name
from axrt.scheduler.rules import Feature, Row, StageHere, features_of
from axrt.scheduler.rules.clipping import clipping
from axrt.scheduler.rules.replicas import whole
from axrt.scheduler.simulation.costs import Costs
from axrt.scheduler.simulation.simulator import simulate
from axrt.scheduler.task import Kind

from .pipelines import Pipeline, run_in_random_order


@given(
    st.sampled_from(["1f1b", "zb-v", "breadth-first", "dualpipe", "adaptive", "gpipe"]),
    st.integers(0, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(),
)
def test_it_ends_in_any_order_of_events(
    name: str, lag: int, copies: int, buckets: int, seed: int
) -> None:
    pipeline = Pipeline(
        policy_by_name(name, 8 if name == "adaptive" else 0),
        2,
        4,
        steps=3,
        replicas=copies,
        buckets=buckets,
        slots=seed % 3 % 2,
        shards=seed % 5 < 3,
        lag=lag,
        preconditions=True,
    )
    run_in_random_order(pipeline, seed)
    assert pipeline.finished
    for of_rank in pipeline.ran:
        kinds = (Kind.STEP, Kind.PRECONDITION)
        counts = [sum(task.kind is kind for task in of_rank) for kind in kinds]
        assert counts[0] == counts[1] > 0


def test_a_bucket_that_is_whole_is_changed_while_others_are_not() -> None:
    """The work of a stage with two buckets, of which the first one to be whole begins at once."""
    policy = policy_by_name("1f1b")
    job = Job(placement_for(policy, 2, 4), policy, 4, votes=True, preconditions=True)
    line = simulate(job, Costs(others={Kind.PRECONDITION: 5.0}), steps=1)
    spans = {str(span.task): span for span in line.spans}
    assert spans["precond1.0"].start == spans["B1.3"].end < spans["B0.3"].end
    for stage in range(2):
        assert spans[f"norm{stage}.0"].start >= spans[f"precond{stage}.0"].end
        assert spans[f"step{stage}.0"].start >= spans["vote0.0"].end


def in_no_order(job: Job) -> list[Feature]:
    """The features of a job whose votes do not wait for changes."""

    def votes_at_once(here: StageHere) -> Iterator[Row]:
        for row in clipping(here):
            of_changes = [need for need in row.needs if need.counter is Kind.PRECONDITION]
            others = [need for need in row.needs if need not in of_changes]
            at_once = [whole(here, need.bucket or 0) for need in of_changes]
            yield with_(row, needs=tuple(dict.fromkeys((*at_once, *others))))

    return [votes_at_once if feature is clipping else feature for feature in features_of(job)]


def test_a_vote_that_does_not_wait_is_found() -> None:
    def attack() -> None:
        for seed in range(99):
            policy = policy_by_name("1f1b")
            of = Pipeline(policy, 1, 2, steps=4, preconditions=True, features=in_no_order)
            run_in_random_order(of, seed)

    with pytest.raises(AssertionError, match="norm"):
        attack()
