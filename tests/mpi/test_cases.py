"""Every case under mpirun, one job a world size; the default run has the job of two ranks.

Nothing else sends by a real MPI library what ranks of one process hand over: payloads, large
messages in pieces, the order of both, and the bits of each kind of training that rest on them.
"""

import pytest

from . import cases
from .jobs import said

SIZES = (1, 2, 3, 4)
CASES = [
    pytest.param(size, name, marks=[pytest.mark.sweep] * (size != 2))
    for size in SIZES
    for name in cases.names(size)
]


@pytest.mark.parametrize(("size", "case"), CASES)
def test_holds_under_mpirun(size: int, case: str) -> None:
    assert said(cases.__name__, size, case) == ""
