"""Every case under mpirun, one job a world size."""

import pytest

from . import cases
from .jobs import said

SIZES = (1, 2, 3, 4)


@pytest.mark.parametrize(
    ("size", "case"), [(size, name) for size in SIZES for name in cases.names(size)]
)
def test_holds_under_mpirun(size: int, case: str) -> None:
    assert said(cases.__name__, size, case) == ""
