"""The cases of this folder, each on the ranks of one job with a simulated accelerator."""

import pytest

from tests.mpi.jobs import said

from . import cases
from .simulated import NAME, NoCompiler, built


@pytest.mark.parametrize(
    ("size", "case"), [(size, name) for size in (1, 2) for name in cases.names(size)]
)
def test_holds_on_a_simulated_accelerator(size: int, case: str) -> None:
    try:
        built()
    except NoCompiler as error:
        pytest.skip(str(error))
    assert said(cases.__name__, size, case, NAME) == ""
