"""Muon for matrices and AdamW for all else, as one optimizer.

Muon is torch's own (Jordan et al. 2024): the step of a matrix is its momentum, made orthogonal.
"""

# A fused parameter is several matrices, each of which is stepped by itself: torch's Muon is given
# views of its rows. It is made anew for each step, since what it steps may be a piece of a shard
# from then on, in other memory; its state is kept here, by parameter.

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .eager_optimizers import AdamW, Eager

Blocks = tuple[int, ...]  # rows of each matrix that a parameter is fused of
OPERATIONS_OF_ADAMW = 12  # an element, decay and bias corrections included
_ITERATIONS = 5
_OPTIONS = ("lr", "weight_decay", "momentum", "adjust_lr_fn")


class _Muon(Eager, torch.optim.Muon):
    step = torch.no_grad()(inspect.unwrap(torch.optim.Muon.step))


class MuonAndAdamW(Eager, torch.optim.Optimizer):
    """One optimizer of a bucket.

    Args:
        matrices: parameters with two dimensions that Muon steps, by the blocks they are fused of.
        options: options of Muon, see `torch.optim.Muon`.
        rest: groups of other parameters, with options of `torch.optim.AdamW`.
    """

    def __init__(
        self,
        matrices: Mapping[Blocks, Sequence[nn.Parameter]],
        options: Mapping[str, Any],
        rest: Sequence[dict[str, Any]],
    ) -> None:
        groups = [
            {"params": list(of), "blocks": blocks, **options} for blocks, of in matrices.items()
        ]
        self._adamw = AdamW([dict(group) for group in rest]) if rest else None
        others = self._adamw.param_groups if self._adamw else []
        for group in others:
            group["blocks"] = ()
        super().__init__([*groups, *others], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step all parameters that have a gradient; there is no closure."""
        for group in self.param_groups:
            if group["blocks"]:
                self._step_matrices(group)
        if self._adamw is not None:
            self._adamw.param_groups = [one for one in self.param_groups if not one["blocks"]]
            self._adamw.state = self.state
            self._adamw.step()

    def _step_matrices(self, group: dict[str, Any]) -> None:
        stepped: list[Tensor] = []
        buffers: list[Tensor] = []
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter.grad)
            buffer = state["momentum_buffer"]
            stepped += _matrices_in(parameter, parameter.grad, group["blocks"])
            buffers += torch.split(buffer, _rows(buffer, group["blocks"]))
        if not stepped:
            return
        muon = _Muon(stepped, **{key: group[key] for key in _OPTIONS})
        for matrix, buffer in zip(stepped, buffers, strict=True):
            muon.state[matrix]["momentum_buffer"] = buffer
        muon.step()


def _matrices_in(parameter: nn.Parameter, gradient: Tensor, blocks: Blocks) -> Iterable[Tensor]:
    rows = _rows(parameter, blocks)
    if len(rows) == 1:
        return [parameter]
    views = torch.split(parameter.detach(), rows)  # which count up the parameter's version
    for view, of_view in zip(views, torch.split(gradient, rows), strict=True):
        view.grad = of_view
    return views


def _rows(parameter: Tensor, blocks: Blocks) -> list[int]:
    """The rows of each matrix; those of one where a parameter has another shape, as a tiny one on
    which an optimizer is tried."""
    return list(blocks) if sum(blocks) == len(parameter) else [len(parameter)]


def operations_of_muon(rows: int, columns: int) -> float:
    """Operations of a step of one matrix: each iteration multiplies it by its own transpose, that
    by itself, and the sum of both by the matrix."""
    short, long = sorted((rows, columns))
    return 2.0 * _ITERATIONS * (2 * short**2 * long + short**3)
