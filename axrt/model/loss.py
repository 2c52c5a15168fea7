"""A loss that is a module with weights or buffers: the last layer of the model, so that these are
moved, trained, clipped, listed and saved like all others."""

from typing import Any

from torch import nn


class Loss(nn.Module):
    """Hands on what the layer before returned. The stage calls `loss` with that and the target.

    Args:
        loss: the user's module.
    """

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, value: Any) -> Any:
        return value


def has_tensors(loss: nn.Module) -> bool:
    """A loss has parameters or buffers."""
    return any(True for of in (loss.parameters(), loss.buffers()) for _ in of)
