"""A step of a team is foretold with a few joints and two members: added up by hand."""

import pytest

from axrt.config import Schedule
from axrt.planning.few_joints import with_few_joints
from axrt.planning.step_prediction import predicted
from axrt.scheduler.job import Job
from axrt.scheduler.numbering import StageJoints
from axrt.scheduler.placement import Linear
from axrt.scheduler.policies import policy_by_name
from axrt.scheduler.simulation.cost_table import LayerCosts
from axrt.scheduler.simulation.costs import Edge
from axrt.scheduler.simulation.model_costs import ModelCosts

TASK_S, WITHIN = 0.01, Edge(0.1, 1000.0)


@pytest.mark.parametrize("fills", [True, False])
@pytest.mark.parametrize("team", [2, 4])
@pytest.mark.parametrize(("forward", "back"), [(1, 0), (3, 2), (20, 12)])
def test_one_microbatch_on_one_rank_takes_all_of_its_pieces_and_exchanges(
    forward: int, back: int, team: int, fills: bool
) -> None:
    layer = LayerCosts(2.0, 3.0, 4.0, 0, 0, 0.0, joints=(50,) * forward, back_joints=(70,) * back)
    joints = {0: StageJoints(forward, back)}
    policy = policy_by_name("1f1b")
    job = Job(Linear(1), policy, 1, cuts=(0, 1), team=team, joints=joints, fills=fills)
    known = ModelCosts([layer], task_s=TASK_S, team=team, within=WITHIN)
    exchanges = forward * WITHIN.seconds(50) + back * WITHIN.seconds(70)
    pieces = 2 + forward + back
    found = predicted(Schedule(), job, known).step_s
    assert found == pytest.approx(2.0 + 3.0 + 4.0 + pieces * TASK_S + exchanges)
    few, _ = with_few_joints(job, known)
    assert (few.team, few.joints_of(0)) == (2, StageJoints(min(forward, 8), min(back, 8)))


def test_links_between_ranks_are_those_of_all_members() -> None:
    """Of two stages, with a link that is slower there than back."""
    layer = LayerCosts(1.0, 1.0, 1.0, 100, 0, 0.0)
    job = Job(Linear(2), policy_by_name("1f1b"), 1, cuts=(0, 1, 2))
    known = ModelCosts([layer, layer], edges={(0, 1): Edge(5.0), (1, 0): Edge(3.0)}, task_s=0.0)
    alone = predicted(Schedule(), job, known).step_s
    for team in (2, 4):
        of_team = Job(Linear(2), job.policy, 1, cuts=job.cuts, team=team)
        assert predicted(Schedule(), of_team, known._replace(team=team)).step_s == alone
    assert alone == pytest.approx(2 * 3.0 + 5.0 + 3.0, rel=0.2)
