"""What calls of the engine return."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from axrt.losses import Losses, mean_loss


@dataclass(frozen=True, slots=True)
class StepResult:
    """One optimizer step, as far as this rank is done with it.

    Args:
        step: counted from 0.
        loss: the mean over the step's microbatches, of all replicas; on every rank.
        lr: learning rate of the first parameter group on this rank; nan where the rank has no
            parameters.
        skipped: the norm of the gradients was infinite or not a number, and no rank has stepped
            (only where steps are clipped).
    """

    step: int
    loss: float
    lr: float
    skipped: bool
    _grad_norm: Callable[[], float | None] = field(repr=False)

    @property
    def grad_norm(self) -> float | None:
        """The 2-norm of all gradients before clipping: on every rank where steps are clipped;
        elsewhere on the main rank, where reading it may wait for messages, and None on the
        others."""
        return self._grad_norm()


@dataclass(frozen=True, slots=True)
class EvalResult:
    """One evaluation. Reading it may wait for messages."""

    _replicas: Callable[[], list[tuple[Losses, list[Any]]]] = field(repr=False)

    @property
    def loss(self) -> float:
        """The mean over all microbatches of all replicas, on every rank."""
        return mean_loss([losses for losses, _ in self._replicas()])

    @property
    def microbatches(self) -> int:
        """How many there were, of all replicas."""
        return sum(len(losses.values) for losses, _ in self._replicas())

    @property
    def outputs(self) -> list[Any]:
        """What the last layer returned for each microbatch, replica by replica; on the main rank,
        if they were asked for, else none."""
        return [output for _, outputs in self._replicas() for output in outputs]
