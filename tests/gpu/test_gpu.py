"""The code for GPUs: where there is one (`pytest -m gpu`), and everywhere on the simulated
accelerator, whose checker may find nothing. On the CPU it is the cases that are tried."""

import pytest

from tests.device.simulated import NAME, NoCompiler, built
from tests.mpi.jobs import said

from . import cases

SIZES = {"cpu": (1, 2), NAME: (1, 2, 4), "cuda": (1, 2)}


def is_left_out(device: str, size: int, name: str) -> bool:
    """What two ranks try on the simulated accelerator is left to the run of all elsewhere: on one
    rank, on four, and on the CPU."""
    return device != "cuda" and (device, size) != (NAME, 2) and name in cases.names(2, NAME)


def marks_of(device: str, size: int, name: str) -> list[pytest.MarkDecorator]:
    left_out = [pytest.mark.sweep, pytest.mark.combination] * is_left_out(device, size, name)
    return [pytest.mark.gpu] if device == "cuda" else left_out


CASES = [
    pytest.param(device, size, name, marks=marks_of(device, size, name))
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
    # Those that run when it does have one job.
    left_out = is_left_out(device, size, case)
    shared = tuple(
        name for name in cases.names(size, device) if is_left_out(device, size, name) == left_out
    )
    assert said(cases.__name__, size, case, device, shared) == ""
