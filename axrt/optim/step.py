"""The optimizer of one stage: the user's factory is called once, with this stage's parameters by name."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

OptimizerFactory = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
Schedule = Callable[[int], float]


def constant(step: int) -> float:
    """The schedule that leaves the learning rate as it is."""
    return 1.0


class StageOptimizer:
    """Steps the parameters of one stage.

    Args:
        named: (name, parameter) pairs; a stage without any has no optimizer and nothing to do.
        factory: makes the optimizer; parameter groups may carry learning rates of their own.
        schedule: `schedule(step)` is the factor on every group's learning rate.
    """

    def __init__(self, named: list[tuple[str, nn.Parameter]], factory: OptimizerFactory, schedule: Schedule) -> None:
        self._parameters = [parameter for _, parameter in named]
        self._schedule = schedule
        self._optimizer = factory(named) if named else None
        self._groups: list[dict[str, Any]] = self._optimizer.param_groups if self._optimizer else []
        self._initial_lrs = [group["lr"] for group in self._groups]

    @property
    def lr(self) -> float | None:
        """Of the first parameter group, in the last step; None where there is none."""
        return float(self._groups[0]["lr"]) if self._groups else None

    def norms(self) -> Tensor:
        """The 2-norm of each gradient, in model order; shape (number of parameters with a gradient,)."""
        norms = [torch.linalg.vector_norm(parameter.grad) for parameter in self._parameters if parameter.grad is not None]
        return torch.stack(norms) if norms else torch.empty(0)

    def step(self, step: int) -> None:
        """Apply the gradients of this step and forget them."""
        if self._optimizer is None:
            return
        factor = self._schedule(step)
        for group, initial in zip(self._groups, self._initial_lrs, strict=True):
            group["lr"] = initial * factor
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
