"""The code for GPUs: where there is one (`pytest -m gpu`), and everywhere on the simulated
accelerator, whose checker may find nothing. On the CPU it is the cases that are tried.

Nothing else sees what waits for what on a device. The default run has every case in a few of its
ways, on the two ranks of one job; `.ci/run` has all ways there. The full run has one rank and four,
too.
"""

import pytest

from tests.device.simulated import NAME, NoCompiler, built
from tests.mpi.jobs import said
from tests.sweeps import is_full

from . import cases

SIZES = {"cpu": (1, 2), NAME: (1, 2, 4), "cuda": (1, 2)}


def marks_of(device: str, size: int) -> list[pytest.MarkDecorator]:
    if device == "cuda":
        return [pytest.mark.gpu]
    return [pytest.mark.sweep] * ((device, size) != (NAME, 2))


CASES = [
    pytest.param(device, size, name, marks=marks_of(device, size))
    for device, sizes in SIZES.items()
    for size in sizes
    for name in cases.names(size, device)
]


def check(device: str, size: int, case: str, all_ways: bool) -> None:
    if device == NAME:
        try:
            built()  # once, before ranks ask for it
        except NoCompiler as error:
            pytest.skip(str(error))
    assert said(cases.__name__, size, case, device, all_ways) == ""


@pytest.mark.parametrize(("device", "size", "case"), CASES)
def test_holds_on_one_device(device: str, size: int, case: str) -> None:
    check(device, size, case, is_full())


@pytest.mark.long
@pytest.mark.parametrize("case", cases.names(2, NAME))
def test_holds_on_a_simulated_accelerator_in_all_its_ways(case: str) -> None:
    check(NAME, 2, case, all_ways=True)
