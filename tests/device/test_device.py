"""The cases of this folder, each on the ranks of one job with a simulated accelerator.

The default run has each in a few of its ways on two ranks, `.ci/run` in all of them.
"""

import pytest

from tests.mpi.jobs import said

from . import cases
from .mutants import MUTANTS, ROOT
from .simulated import NAME, NoCompiler, built


def test_every_fault_that_is_planted_has_its_place() -> None:
    for mutant in MUTANTS:
        text = (ROOT / mutant.file).read_text()
        assert text.count(mutant.old) == 1, mutant.fault


def check(size: int, case: str, all_ways: bool) -> None:
    try:
        built()
    except NoCompiler as error:
        pytest.skip(str(error))
    assert said(cases.__name__, size, case, NAME, all_ways) == ""


@pytest.mark.parametrize("case", cases.names(2))
def test_holds_on_a_simulated_accelerator(case: str) -> None:
    check(2, case, all_ways=False)


@pytest.mark.long
@pytest.mark.parametrize(
    ("size", "case"), [(size, name) for size in (2, 1) for name in cases.names(size)]
)
def test_holds_on_a_simulated_accelerator_in_all_its_ways(size: int, case: str) -> None:
    check(size, case, all_ways=True)
