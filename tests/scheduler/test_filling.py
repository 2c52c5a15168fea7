"""Whether other work fills the time at joints, by policy."""

from dataclasses import replace

import pytest

from axrt.scheduler.job import Job
from axrt.scheduler.numbering import StageJoints
from axrt.scheduler.planning import filling
from axrt.scheduler.simulation.schedules import build_schedule


def with_joints(name: str, joints: int = 7, team: int = 2) -> Job:
    job, of_stage = build_schedule(name, 4, 16), StageJoints(joints, joints)
    return replace(job, team=team, joints=dict.fromkeys(range(job.stages), of_stage))


# One step on four ranks with 16 microbatches, slices of half a piece; published with the schedules.
@pytest.mark.parametrize(
    ("name", "fills"), [("1f1b", False), ("zb-h1", False), ("eager-1f1b", True), ("zb-h2", True)]
)
def test_it_pays_where_the_caps_leave_room(name: str, fills: bool) -> None:
    assert filling.fills(with_joints(name)) is fills


def test_replicas_larger_teams_and_more_joints_change_nothing() -> None:
    job = with_joints("1f1b", 40, team=8)
    assert not filling.fills(replace(job, replicas=3, votes=True, slots=2))


def test_of_a_large_step_the_first_microbatches_are_simulated() -> None:
    assert not filling.fills(replace(with_joints("1f1b"), microbatches=1600))
    assert filling.fills(replace(with_joints("zb-h2"), microbatches=1600))


@pytest.mark.parametrize("name", ["interleaved-1f1b", "interleaved-zb", "chimera"])
def test_only_what_a_policy_takes_is_simulated(name: str) -> None:
    """Multiples of the ranks, or of the pipes: of other numbers a step would not end."""
    job = replace(with_joints(name), joints=dict.fromkeys(range(8), StageJoints(6, 6)))
    assert isinstance(filling.fills(replace(job, microbatches=64)), bool)


def test_what_has_no_joints_is_not_simulated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*args: object) -> None:
        raise AssertionError("simulated")

    monkeypatch.setattr(filling, "simulate", never)
    assert filling.fills(build_schedule("1f1b", 4, 16))
