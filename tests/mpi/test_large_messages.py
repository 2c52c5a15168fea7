"""Large messages arrive while their sender computes: the receiver takes them by itself where the
system lets it (single copy), and elsewhere a thread of the sender looks after them."""

import json
import sys

import pytest

from .mpirun import is_open_mpi, launcher, mpirun, run
from .test_failures import OVER_THE_NETWORK

NO_SINGLE_COPY = {
    "MPIR_CVAR_CH4_CMA_ENABLE": "0",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_smsc": "^cma,xpmem,knem",
}
SELDOM = 60  # looks in the second or so that the sender computes, one every 20 ms


@pytest.mark.parametrize(
    "where", [{}, NO_SINGLE_COPY, OVER_THE_NETWORK], ids=["as it is", "two copies", "network"]
)
def test_large_messages_come_while_their_sender_computes(where: dict[str, str]) -> None:
    ended = mpirun(2, ["-m", "tests.mpi.large_messages"], timeout_s=60, extra=where)
    assert ended.code == 0, ended.err
    said = json.loads(ended.out)
    assert said["came"], said
    assert said["ours"] == said["raw"], said
    assert not (where and said["ours"]), said
    assert said["looks"] < SELDOM or not said["ours"], said


@pytest.mark.parametrize(
    ("place", "left"), [("split", 3), ("before", 3), ("within", 3), ("leaves", 4)]
)
def test_a_rank_that_is_lost_in_the_trial_holds_nobody_up(place: str, left: int) -> None:
    """Rank 0, whose partner waits for its messages."""
    if not is_open_mpi():
        pytest.skip("MPICH's mpirun ends all ranks when one is lost")
    ranks = [sys.executable, "-m", "tests.mpi.lost_in_trial", "0", place]
    ended = run([launcher(), "--with-ft", "ulfm", "-n", "4", *ranks], timeout_s=60)
    assert ended.out.count("heard") == left, ended.out + ended.err
