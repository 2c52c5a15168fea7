"""One member of a team in place of two: the same times."""

from dataclasses import replace
from itertools import permutations, product
from random import Random

import pytest

from axrt.scheduler.job import Job
from axrt.scheduler.numbering import StageJoints
from axrt.scheduler.simulation.costs import Costs, Edge, Work
from axrt.scheduler.simulation.one_member import one_member
from axrt.scheduler.simulation.schedules import build_schedule
from axrt.scheduler.simulation.simulator import simulate
from axrt.scheduler.simulation.timeline import Timeline
from axrt.scheduler.task import Kind

POLICIES = ("gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2", "zb-v", "interleaved-1f1b", "chimera")


def world(name: str, seed: int) -> tuple[Job, Costs]:
    """A job of teams that wait at joints, stages that differ, and links that do. No two times are
    equal: where events tie, rounding decides which comes first."""
    draw = Random(f"{name} {seed}")

    def times(least: float, most: float) -> tuple[float, ...]:
        return tuple(draw.uniform(least, most) for _ in range(job.stages))

    job = build_schedule(name, draw.choice([2, 4]), draw.choice([4, 8]))
    again = [stage for stage in range(job.stages) if draw.random() < 0.3]
    job = replace(
        job,
        team=2,
        fills=False,
        joints={of: StageJoints(draw.randrange(4), draw.randrange(4)) for of in range(job.stages)},
        recomputed=dict.fromkeys(again, 1),
        votes=draw.random() < 0.5,
    )
    works = zip(times(0.5, 3), times(0.5, 3), times(0.5, 3), times(0.1, 3), strict=True)
    links = {pair: Edge(draw.uniform(0, 0.3), 8.0) for pair in permutations(range(job.ranks), 2)}
    return job, Costs(
        tuple(Work(*of) for of in works),
        step_of=times(0.5, 3),
        exchange_of=times(0, 0.7),
        task=draw.uniform(0, 0.05),
        edges={
            (2 * a + one, 2 * b + other): link
            for (a, b), link in links.items()
            for one, other in product((0, 1), repeat=2)
        },
        recomputed=dict.fromkeys(again, draw.uniform(0.3, 1)),
        pieces=draw.choice([1, 3]),
    )


@pytest.mark.parametrize("name", POLICIES)
def test_steps_end_when_those_of_two_members_do(name: str) -> None:
    for seed in range(5):
        job, costs = world(name, seed)
        fewer, alike = one_member(job, costs)
        assert fewer.team == 1
        whole, one = simulate(job, costs, steps=2), simulate(fewer, alike, steps=2)
        assert one.makespan == pytest.approx(whole.makespan, rel=1e-9)
        for rank in range(job.ranks):
            assert ends(one, rank) == pytest.approx(ends(whole, 2 * rank), rel=1e-9)


def ends(line: Timeline, rank: int) -> list[float]:
    """When the rank's optimizer steps end."""
    return [span.end for span in line.spans if span.rank == rank and span.task.kind is Kind.STEP]


@pytest.mark.parametrize(
    ("job_has", "costs_have"),
    [
        ({"fills": True}, {}),
        ({"team": 1, "joints": {}}, {}),
        ({"team": 4}, {}),
        ({}, {"jitter": 0.1}),
        ({}, {"lengths": 0.1}),
        ({}, {"edge_shared": True}),
        ({}, {"node": 2}),
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
