"""Gradients of matrices become changes before steps are voted on."""

from dataclasses import replace as with_
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axrt.scheduler.job import Job
from axrt.scheduler.policies import placement_for, policy_by_name
from axrt.scheduler.rules import Row, StageHere
from axrt.scheduler.rules.clipping import clipping
from axrt.scheduler.rules.replicas import whole
from axrt.scheduler.simulation.costs import Costs
from axrt.scheduler.simulation.simulator import simulate
from axrt.scheduler.task import Kind

from ..sweeps import examples
from .once_a_step import ANY, attack, counts, run


@given(lag=st.integers(0, 3), **ANY)
@examples(100, quick=25)
def test_it_ends_in_any_order_of_events(seed: int, **keys: Any) -> None:
    pipeline = run(seed=seed, steps=3, shards=seed % 5 < 3, preconditions=True, **keys)
    for steps, changes in counts(pipeline, Kind.STEP, Kind.PRECONDITION):
        assert steps == changes > 0


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


def at_once(here: StageHere, row: Row) -> Row:
    """A vote that does not wait for changes."""
    of_changes = [need for need in row.needs if need.counter is Kind.PRECONDITION]
    others = [need for need in row.needs if need not in of_changes]
    wholes = [whole(here, need.bucket or 0) for need in of_changes]
    return with_(row, needs=tuple(dict.fromkeys((*wholes, *others))))


def test_a_vote_that_does_not_wait_is_found() -> None:
    with pytest.raises(AssertionError, match="norm"):
        attack(clipping, at_once, preconditions=True)
