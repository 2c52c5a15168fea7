"""What an optimizer computes anew now and then fills idle time, and is there when a step uses
it."""

from dataclasses import replace as with_
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axrt.scheduler.counters import Gate
from axrt.scheduler.job import Job
from axrt.scheduler.policies import placement_for, policy_by_name
from axrt.scheduler.rules import Row, StageHere
from axrt.scheduler.rules.replicas import replicas
from axrt.scheduler.simulation.costs import Costs
from axrt.scheduler.simulation.simulator import simulate
from axrt.scheduler.simulation.timeline import Timeline
from axrt.scheduler.task import Kind

from ..sweeps import examples
from .once_a_step import ANY, attack, counts, run


def ran(takes: float, lag: int, policy: str = "1f1b", ranks: int = 4, steps: int = 5) -> Timeline:
    of = policy_by_name(policy)
    job = Job(placement_for(of, ranks, 8), of, 8, lag=lag)
    return simulate(job, Costs(others={Kind.REFRESH: takes}), steps=steps)


@pytest.mark.parametrize("policy", ["1f1b", "gpipe"])
def test_it_costs_nothing_where_ranks_are_idle_for_as_long(policy: str) -> None:
    """Each of four ranks is idle for nine units a step, and the second one for three at a time."""
    without, found = ran(0.0, 1, policy), ran(3.0, 1, policy)
    refreshed = sum(span.end - span.start for span in found.spans if span.task.kind is Kind.REFRESH)
    assert refreshed == 4 * 4 * 3.0
    assert last_step(found) == last_step(without)
    assert last_step(ran(6.0, 1, policy)) > last_step(without)


def last_step(line: Timeline) -> float:
    return max(span.end for span in line.spans if span.task.kind is Kind.STEP)


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_a_step_waits_for_what_it_uses(lag: int) -> None:
    line = ran(1000.0, lag, ranks=2)
    ended = {str(span.task): span.end for span in line.spans if span.task.kind is Kind.REFRESH}
    begun = {str(span.task): span.start for span in line.spans if span.task.kind is Kind.STEP}
    for stage in range(2):
        for step in range(lag, 5):
            assert begun[f"step{stage}.{step}"] >= ended[f"refresh{stage}.{step - lag}"]
        assert begun[f"step{stage}.{lag - 1}"] < lag * 1000.0, "the first ones wait for none"


@given(lag=st.integers(1, 3), **ANY)
@examples(100, quick=25)
def test_it_ends_in_any_order_of_events(seed: int, **keys: Any) -> None:
    pipeline = run(seed=seed, steps=4, clips=seed % 2 == 0, shards=seed % 5 < 2, **keys)
    for steps, refreshes in counts(pipeline, Kind.STEP, Kind.REFRESH):
        assert steps * 3 == refreshes * 4 > 0, "the last of four steps has none behind it"


def at_once(here: StageHere, row: Row) -> Row:
    """A step that waits for no refresh."""
    return with_(row, needs=tuple(of for of in row.needs if of.counter is not Gate.REFRESHED))


def test_a_step_that_does_not_wait_is_found() -> None:
    with pytest.raises(AssertionError, match="step"):
        attack(replicas, at_once, lag=1)
