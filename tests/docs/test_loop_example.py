"""The loop in 200 lines is what it says: a pipeline whose losses are those of plain PyTorch."""

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import mse_loss

from ..mpi.mpirun import mpirun

FILE = Path(__file__).resolve().parents[2] / "examples" / "loop_in_200_lines.py"


def example() -> Any:
    spec = importlib.util.spec_from_file_location("loop_in_200_lines", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def plain() -> list[float]:
    """The losses of one process, microbatch by microbatch."""
    of, means = example(), []
    model = of.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    for step in range(of.STEPS):
        mean = 0.0
        for x, target in of.batches(step):
            loss = mse_loss(model(x), target) / of.MICROBATCHES
            loss.backward()
            mean += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        means.append(mean)
    return means


def test_it_has_200_lines_at_most_and_nothing_of_axrt() -> None:
    text = FILE.read_text()
    assert text.count("\n") <= 200
    assert "import axrt" not in text
    assert "from axrt" not in text


def test_ranks_that_are_threads_have_the_losses_of_plain_torch() -> None:
    assert example().on_threads() == plain()


def test_ranks_under_mpi_have_them_too() -> None:
    told = mpirun(2, [str(FILE)], timeout_s=600)
    assert told.code == 0, told.err
    assert [float(line) for line in told.out.split()] == plain()
