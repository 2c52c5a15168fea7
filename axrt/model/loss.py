"""A loss that is a module with weights or buffers: the last layer of the model, so that these are
moved, trained, clipped, listed and saved like all others."""

import math
from collections.abc import Callable
from typing import Any

from torch import nn

from axrt.errors import ConfigError, NonFiniteLossError

from .layers import lazy_in, told


# A loss with weights is a layer. It is the last one and hands its value on; the stage calls the
# module. So its weights are cut into buckets, stepped, clipped, saved, evaluated and run again by
# what does that for layers, and no second way exists. A loss without tensors stays no layer, since
# a layer more would refuse checkpoints from before.
class Loss(nn.Module):
    """Hands on what the layer before returned. The stage calls `loss` with that and the target."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, value: Any) -> Any:
        return value


def check_has_shapes(loss: object) -> None:
    """Refuse a loss whose weights have no shape yet.

    Raises:
        ConfigError: it has some.
    """
    if isinstance(loss, nn.Module) and (lazy := lazy_in(loss)):
        raise ConfigError(f"loss_fn is {told(loss)}: {lazy}")


def has_tensors(loss: nn.Module) -> bool:
    """A loss has parameters or buffers."""
    return any(True for of in (loss.parameters(), loss.buffers()) for _ in of)


def check_finite(value: float, where: Callable[[], str], what: str = "loss") -> None:
    """Check that a loss is a finite number.

    Args:
        where: function that gives step, stage and microbatch, for the error.
    Raises:
        NonFiniteLossError: it is infinite or not a number.
    """
    if not math.isfinite(value):
        raise NonFiniteLossError(
            f"the {what} is {value} at {where()} (all counted from 0); expected a finite number. "
            "Look at that microbatch's data, lower optimizer.lr, or lengthen optimizer.warmup_steps"
        )
