"""Muon for matrices and AdamW for all else, as one optimizer.

Muon is torch's own (Jordan et al. 2024): the step of a matrix is its momentum, made orthogonal.
"""

# Torch's Muon is given views of the rows of a fused parameter. It is made anew for each step, since
# what it steps may be a piece of a shard from then on, in other memory; its state is kept here, by
# parameter.

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .eager_optimizers import Eager
from .matrix_optimizer import Blocks, MatrixOptimizer, matrices_in, with_gradient

_ITERATIONS = 5
_OPTIONS = ("lr", "weight_decay", "momentum", "adjust_lr_fn")


class _Muon(Eager, torch.optim.Muon):
    step = torch.no_grad()(inspect.unwrap(torch.optim.Muon.step))


class MuonAndAdamW(MatrixOptimizer):
    """Its groups of matrices have options of `torch.optim.Muon`."""

    def step_matrices(self, group: dict[str, Any]) -> None:
        stepped: list[Tensor] = []
        buffers: list[Tensor] = []
        for parameter, gradient in with_gradient(group):
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(gradient)
            stepped += _with_gradients(parameter, gradient, group["blocks"])
            buffers += matrices_in(state["momentum_buffer"], group["blocks"])
        if not stepped:
            return
        muon = _Muon(stepped, **{key: group[key] for key in _OPTIONS})
        for matrix, buffer in zip(stepped, buffers, strict=True):
            muon.state[matrix]["momentum_buffer"] = buffer
        muon.step()


def _with_gradients(parameter: nn.Parameter, gradient: Tensor, blocks: Blocks) -> Iterable[Tensor]:
    views = matrices_in(parameter.detach(), blocks)  # which count up the parameter's version
    if len(views) == 1:
        return [parameter]
    for view, of_view in zip(views, matrices_in(gradient, blocks), strict=True):
        view.grad = of_view
    return views


def operations_of_muon(rows: int, columns: int) -> float:
    """Operations of a step of one matrix: each iteration multiplies it by its own transpose, that
    by itself, and the sum of both by the matrix."""
    short, long = sorted((rows, columns))
    return 2.0 * _ITERATIONS * (2 * short**2 * long + short**3)
