"""A loss that is a module with weights or buffers: the last layer of the model, so that these are
moved, trained, clipped, listed and saved like all others."""

from typing import Any

from torch import nn


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


def has_tensors(loss: nn.Module) -> bool:
    """A loss has parameters or buffers."""
    return any(True for of in (loss.parameters(), loss.buffers()) for _ in of)
