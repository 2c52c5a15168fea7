"""Large messages arrive while their sender computes: the receiver takes them by itself where the
system lets it (single copy), and elsewhere a thread of the sender looks after them.

Nothing else tries messages of over an MPI call's size on each way that they can take, nor the
thread over a network, where a sender may also stop in the middle of one.
"""

import json
import re
import sys

import pytest

from .jobs import ends
from .mpirun import Ended, is_open_mpi, launcher, run
from .trials import Trial

AS_IT_IS = ()
NO_SINGLE_COPY = (
    ("MPIR_CVAR_CH4_CMA_ENABLE", "0"),
    ("OMPI_MCA_pml", "ob1"),
    ("OMPI_MCA_smsc", "^cma,xpmem,knem"),
)
# As between nodes.
OVER_THE_NETWORK = (
    ("OMPI_MCA_btl", "self,tcp"),
    ("OMPI_MCA_pml", "ob1"),
    ("MPIR_CVAR_NOLOCAL", "1"),
)
MESSAGES, STOPPED = Trial("large_messages_come"), Trial("a_rank_is_stopped_while_it_sends")
SELDOM = 60  # looks in the half second that the sender computes, one every 20 ms


def told(where: tuple[tuple[str, str], ...]) -> dict[str, Ended]:
    """The ends of what is tried so, on one job."""
    trials = (MESSAGES, STOPPED) if where == OVER_THE_NETWORK else (MESSAGES,)
    return dict(ends(2, trials, where))


@pytest.mark.parametrize(
    "where",
    [AS_IT_IS, OVER_THE_NETWORK, pytest.param(NO_SINGLE_COPY, marks=pytest.mark.sweep)],
    ids=["as it is", "network", "two copies"],
)
def test_large_messages_come_while_their_sender_computes(
    where: tuple[tuple[str, str], ...],
) -> None:
    ended = told(where)[MESSAGES.name]
    assert ended.code == 0, ended.err
    said = json.loads(ended.out)
    assert said["came"], said
    assert said["ours"] == said["raw"], said
    assert not (where and said["ours"]), said
    assert said["looks"] < SELDOM or not said["ours"], said


def test_a_rank_that_is_stopped_while_a_large_tensor_comes_from_it_is_found() -> None:
    ended = told(OVER_THE_NETWORK)[STOPPED.name]
    assert ended.code == 69
    assert re.search(
        r"rank 1 has waited \d+ s for rank 0, which has shown no sign of life", ended.err
    ), ended.err


@pytest.mark.parametrize(
    ("place", "left"), [("split", 3), ("before", 3), ("within", 3), ("leaves", 4)]
)
def test_a_rank_that_is_lost_in_the_trial_holds_nobody_up(place: str, left: int) -> None:
    """Rank 0, whose partner waits for its messages."""
    if not is_open_mpi():
        pytest.skip("MPICH's mpirun ends all ranks when one is lost")
    ranks = [sys.executable, "-m", "tests.mpi.lost_in_trial", "0", place]
    ended = run([launcher(), "--with-ft", "ulfm", "-n", "4", *ranks], timeout_s=300)
    assert ended.out.count("heard") == left, ended.out + ended.err
