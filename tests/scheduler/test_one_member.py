"""One member of a team in place of two: the same times."""

from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axrt.scheduler.job import Job
from axrt.scheduler.numbering import StageJoints
from axrt.scheduler.simulation.costs import Costs, Edge, Work
from axrt.scheduler.simulation.one_member import one_member
from axrt.scheduler.simulation.schedules import build_schedule
from axrt.scheduler.simulation.simulator import simulate

POLICIES = ("gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2", "zb-v", "interleaved-1f1b", "chimera")
TIMES = st.sampled_from([0.5, 1.0, 1.75, 3.0])


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Job, Costs]:
    """A job of teams that wait at joints, stages that differ, and links that do."""
    name, team = draw(st.sampled_from(POLICIES)), 2
    job = build_schedule(name, draw(st.sampled_from([2, 4])), draw(st.sampled_from([4, 8])))
    stages = range(job.stages)
    joints = st.builds(StageJoints, st.integers(0, 3), st.integers(0, 3))
    again = draw(st.sets(st.sampled_from(list(stages))))
    job = replace(
        job,
        team=team,
        fills=False,
        joints={stage: draw(joints) for stage in stages},
        recomputed=dict.fromkeys(again, 1),
        votes=draw(st.booleans()),
    )
    works = tuple(draw(st.builds(Work, TIMES, TIMES, TIMES, TIMES)) for _ in stages)
    costs = Costs(
        works,
        step_of=tuple(draw(TIMES) for _ in stages),
        exchange_of=tuple(draw(st.sampled_from([0.0, 0.1, 0.7])) for _ in stages),
        task=draw(st.sampled_from([0.0, 0.05])),
        recomputed=dict.fromkeys(again, draw(st.sampled_from([0.5, 1.0]))),
        pieces=draw(st.sampled_from([1, 3])),
    )
    ranks = range(job.ranks)
    slow = draw(st.sampled_from(list(ranks)))
    edges = {
        (a * team + one, b * team + one): Edge(0.3, 2.0) if a == slow else Edge(0.1, 8.0)
        for a, b in permutations(ranks, 2)
        for one in range(team)
    }
    return job, replace(costs, edges=edges)


@given(worlds(), st.integers(1, 2))
@settings(max_examples=60, deadline=None)
def test_steps_end_when_those_of_two_members_do(world: tuple[Job, Costs], steps: int) -> None:
    job, costs = world
    fewer, alike = one_member(job, costs)
    assert fewer.team == 1
    whole, one = simulate(job, costs, steps=steps), simulate(fewer, alike, steps=steps)
    assert one.makespan == pytest.approx(whole.makespan, rel=1e-9)
    ends = [
        sorted(span.end for span in line.on_device() if span.rank == rank)[-1]
        for line, rank in ((whole, (job.ranks - 1) * job.team), (one, job.ranks - 1))
    ]
    assert ends[1] == pytest.approx(ends[0], rel=1e-9)


@pytest.mark.parametrize(
    ("job_has", "costs_have"),
    [
        ({"fills": True}, {}),
        ({"team": 1, "joints": {}}, {}),
        ({"team": 4}, {}),
        ({}, {"jitter": 0.1}),
        ({}, {"lengths": 0.1}),
        ({}, {"stragglers": {1: 2.0}}),
        ({}, {"exchange_of": (100.0,) * 4}),
        ({"votes": True}, {"edge": Edge(0.1)}),
    ],
)
def test_members_that_may_differ_are_simulated(
    job_has: dict[str, object], costs_have: dict[str, object]
) -> None:
    joints = dict.fromkeys(range(4), StageJoints(2, 2))
    job = replace(build_schedule("1f1b", 4, 8), team=2, fills=False, joints=joints)
    job, costs = replace(job, **job_has), replace(Costs(exchange=0.1), **costs_have)  # type: ignore[arg-type]
    assert one_member(job, costs) == (job, costs)
