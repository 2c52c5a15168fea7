"""The results that calls of the engine return."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from axrt.runtime.losses import Losses, mean_loss


@dataclass(frozen=True, slots=True)
class StepResult:
    """One optimizer step, as far as this rank is done with it.

    Args:
        step: number of the step, from 0.
        loss: mean loss over the step's microbatches, of all replicas; on every rank.
        lr: learning rate of the first parameter group on this rank; nan where the rank has no
            parameters.
        skipped: True if the norm of the gradients was infinite or not a number, so that no rank has
            stepped; only where steps are clipped or losses scaled.
        loss_scale: factor on the losses of the step's backwards; None where losses are not scaled.
    """

    step: int
    loss: float
    lr: float
    skipped: bool
    loss_scale: float | None
    _grad_norm: Callable[[], float | None] = field(repr=False)

    @property
    def grad_norm(self) -> float | None:
        """The 2-norm of all gradients before clipping, and without the loss scale.

        Where steps are clipped or losses scaled, every rank has it. Elsewhere only the main rank
        has it, where reading it may wait for messages; on other ranks it is None.
        """
        return self._grad_norm()


@dataclass(frozen=True, slots=True)
class EvalResult:
    """The result of one evaluation. Reading it may wait for messages."""

    _replicas: Callable[[], list[tuple[Losses, list[Any]]]] = field(repr=False)

    @property
    def loss(self) -> float:
        """The mean over all microbatches of all replicas, on every rank."""
        return mean_loss([losses for losses, _ in self._replicas()])

    @property
    def microbatches(self) -> int:
        """Number of microbatches, of all replicas."""
        return sum(len(losses.values) for losses, _ in self._replicas())

    @property
    def outputs(self) -> list[Any]:
        """The outputs of the last layer for each microbatch, replica by replica.

        They are kept on the main rank only, if they were asked for; else the list is empty.
        """
        return [output for _, outputs in self._replicas() for output in outputs]
