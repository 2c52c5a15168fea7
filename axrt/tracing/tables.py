"""What layers read that depends on no input, such as masks and rotary tables."""

# Eager code computes it once in a forward, for all layers. A layer that computed it in each of its
# forwards would take a third of its operations for that. So it is computed once on a device, and
# kept; layers that read the same share it.

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Tables:
    """What one layer reads of it.

    Args:
        names: names of the values in the graph.
        buffers: names of the buffers of a layer that they are computed from.
        compute: function of a layer and a device that gives them.
        shared: values that layers share, by name and key.
    """

    def __init__(
        self,
        names: Sequence[str],
        buffers: Sequence[str],
        compute: Callable[[nn.Module, torch.device], tuple[Tensor, ...]],
        shared: dict[tuple[object, ...], Tensor],
    ) -> None:
        self._names, self._buffers, self._compute = names, buffers, compute
        self._shared, self._known = shared, dict[tuple[object, ...], tuple[Tensor, ...]]()

    def __deepcopy__(self, memo: Any) -> "Tables":
        return self  # copies of a layer have the same

    def of(self, layer: nn.Module, device: torch.device) -> tuple[Tensor, ...]:
        """The values on a device, in the types of the layer's buffers and of autocast."""
        if torch.compiler.is_compiling():  # which folds them
            return self._compute(layer, device)
        types = [layer.get_buffer(name).dtype for name in self._buffers]
        if torch.is_autocast_enabled(device.type):
            types.append(torch.get_autocast_dtype(device.type))
        key: tuple[object, ...] = (device, *types)
        if (known := self._known.get(key)) is not None:
            return known
        with torch.inference_mode(False), torch.no_grad():
            made = self._compute(layer, device)
        if any(type(one) is not Tensor for one in made):  # of a mode, which ends
            return made
        each = zip(self._names, made, strict=True)
        known = tuple(self._shared.setdefault((name, *key), one) for name, one in each)
        return self._known.setdefault(key, known)
