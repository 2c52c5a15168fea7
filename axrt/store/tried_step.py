"""A step of offloaded state that was taken before its vote, and how it is taken back."""

import torch

from axrt.errors import ModelError

from .gradient import Gradient
from .resident import IsMoment, ResidentState


class TriedStep:
    """What there was before the step, besides what is in scratch; made just before it.

    Args:
        optimizer: optimizer that takes the step.
        is_moment: function that says whether a parameter's key is a moment, which is in scratch.
        gradient: gradient that the step needs again if it is taken back; None where it is made anew
            then.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, is_moment: IsMoment, gradient: Gradient | None
    ) -> None:
        self._optimizer, self._gradient = optimizer, gradient
        self._state = ResidentState(optimizer, is_moment)
        self._versions = gradient.versions() if gradient else []

    def take_back(self) -> None:
        """Give the optimizer what it kept on the device before the step.

        Raises:
            ModelError: the step has changed the gradient.
        """
        if self._gradient and self._versions != self._gradient.versions():
            raise ModelError(
                f"a step of {type(self._optimizer).__name__} was taken before the norm of all "
                "gradients was known and has to be taken again, but the optimizer has changed the "
                "gradient; expected optimizer.speculate = 'never'"
            )
        self._state.restore(self._optimizer)
