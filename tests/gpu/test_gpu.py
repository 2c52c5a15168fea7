"""The code for GPUs, where there is one: `pytest -m gpu`; and its cases everywhere, on the CPU."""

import pytest

from tests.mpi.jobs import said

from . import cases


def marks_of(device: str, size: int) -> list[pytest.MarkDecorator]:
    if device == "cuda":
        return [pytest.mark.gpu]
    return [pytest.mark.sweep] * (size == 1)


CASES = [
    pytest.param(device, size, name, marks=marks_of(device, size))
    for device in ("cpu", "cuda")
    for size in (1, 2)
    for name in cases.names(size, device)
]


@pytest.mark.parametrize(("device", "size", "case"), CASES)
def test_holds_on_one_device(device: str, size: int, case: str) -> None:
    assert said(cases.__name__, size, case, device) == ""
