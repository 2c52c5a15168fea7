"""What the loop, the brain, the workers and a stage cost a task, in calls; on two ranks over MPI it
is a case in tests/mpi/cases.py."""

import pytest

from .calls import KINDS, counted

MOST = 100


@pytest.mark.parametrize("policy", KINDS)
def test_a_task_on_a_rank_alone_takes_at_most_a_hundred_calls(policy: str) -> None:
    assert counted(policy, ranks=1).of_a_task(*KINDS[policy]) <= MOST
