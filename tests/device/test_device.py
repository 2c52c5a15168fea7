"""The cases of this folder, each on the ranks of one job with a simulated accelerator."""

import pytest

from tests.mpi.jobs import said

from . import cases
from .mutants import MUTANTS, ROOT
from .simulated import NAME, NoCompiler, built


def test_every_fault_that_is_planted_has_its_place() -> None:
    for mutant in MUTANTS:
        text = (ROOT / mutant.file).read_text()
        assert text.count(mutant.old) == 1, mutant.fault


@pytest.mark.parametrize(
    ("size", "case"), [(size, name) for size in (1, 2) for name in cases.names(size)]
)
def test_holds_on_a_simulated_accelerator(size: int, case: str) -> None:
    try:
        built()
    except NoCompiler as error:
        pytest.skip(str(error))
    assert said(cases.__name__, size, case, NAME) == ""
