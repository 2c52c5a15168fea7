"""Optimizers that look at whole matrices, beside AdamW for all else, as one."""

# A fused parameter is several matrices, each of which is stepped by itself. Groups of matrices come
# first and say by `blocks` how many rows each of them has; groups of AdamW have none.

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .eager_optimizers import AdamW, Eager

Blocks = tuple[int, ...]  # rows of each matrix that a parameter is fused of
OPERATIONS_OF_ADAMW = 12  # an element, decay and bias corrections included


class MatrixOptimizer(Eager, torch.optim.Optimizer):
    """One optimizer of a bucket.

    Args:
        matrices: groups of parameters with two dimensions that are stepped as matrices, with
            options; `blocks` has the rows of each matrix that a parameter is fused of.
        rest: groups of other parameters, with options of `torch.optim.AdamW`.
    """

    def __init__(
        self, matrices: Sequence[dict[str, Any]], rest: Sequence[dict[str, Any]] = ()
    ) -> None:
        self._adamw = AdamW([dict(group) for group in rest]) if rest else None
        others = self._adamw.param_groups if self._adamw else []
        for group in others:
            group["blocks"] = ()
        super().__init__([*map(dict, matrices), *others], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step all parameters that have a gradient; there is no closure."""
        for group in self.param_groups:
            if group["blocks"]:
                self.step_matrices(group)
        if self._adamw is not None:
            self._adamw.param_groups = [one for one in self.param_groups if not one["blocks"]]
            self._adamw.state = self.state
            self._adamw.step()

    def refresh(self) -> None:
        """Compute what is due for a later step. Who has not asked for it before has it computed
        within that step."""

    @abstractmethod
    def step_matrices(self, group: dict[str, Any]) -> None:
        """Step those parameters of a group of matrices that have a gradient."""


def with_gradient(group: Mapping[str, Any]) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """The parameters of a group that have a gradient, with it."""
    for parameter in group["params"]:
        if parameter.grad is not None:
            yield parameter, parameter.grad


def matrices_in(tensor: Tensor, blocks: Blocks) -> Sequence[Tensor]:
    """The matrices that a parameter, or a moment of it, is fused of, as views of its rows."""
    return torch.split(tensor, list(blocks))


def is_factor(key: str) -> bool:
    """An entry of a parameter's state is of the sides of its matrices, and not of its elements."""
    return "." in key
