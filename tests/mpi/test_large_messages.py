"""A large message arrives while its sender computes: its receiver takes it alone where the system
lets it (single copy), and elsewhere a thread of the sender looks after it."""

import json

import pytest

from .mpirun import mpirun
from .test_failures import OVER_THE_NETWORK

NO_SINGLE_COPY = {"MPIR_CVAR_CH4_CMA_ENABLE": "0", "OMPI_MCA_smsc": "^cma,xpmem,knem"}


@pytest.mark.parametrize(
    "where", [{}, NO_SINGLE_COPY, OVER_THE_NETWORK], ids=["as it is", "two copies", "network"]
)
def test_a_large_message_comes_while_its_sender_computes(where: dict[str, str]) -> None:
    ended = mpirun(2, ["-m", "tests.mpi.large_messages"], timeout_s=60, extra=where)
    assert ended.code == 0, ended.err
    said = json.loads(ended.out)
    assert said["came"], said
    assert said["ours"] == said["raw"], said
    assert said["sender looked"] != said["ours"], said
    assert not (where and said["ours"]), said
