"""The code for GPUs: where there is one (`pytest -m gpu`), and everywhere on the simulated
accelerator, whose checker may find nothing. On the CPU it is the cases that are tried."""

import pytest

from tests.device.simulated import NAME, NoCompiler, built
from tests.mpi.jobs import said

from . import cases

SIZES = {"cpu": (1, 2), NAME: (1, 2, 4), "cuda": (1, 2)}


def marks_of(device: str, size: int) -> list[pytest.MarkDecorator]:
    """One and four ranks are left to the run of all, where two have the same cases."""
    if device == "cuda":
        return [pytest.mark.gpu]
    is_left_out = size == (1 if device == "cpu" else 4)
    return [pytest.mark.sweep, pytest.mark.combination] * is_left_out


CASES = [
    pytest.param(device, size, name, marks=marks_of(device, size))
    for device, sizes in SIZES.items()
    for size in sizes
    for name in cases.names(size, device)
]


@pytest.mark.parametrize(("device", "size", "case"), CASES)
def test_holds_on_one_device(device: str, size: int, case: str) -> None:
    if device == NAME:
        try:
            built()  # once, before ranks ask for it
        except NoCompiler as error:
            pytest.skip(str(error))
    assert said(cases.__name__, size, case, device) == ""
