"""Modules that a user gives as they are, where another rank holds them: this one refers to them no
more, and says what memory they take if somebody else does."""

import gc
import weakref
from collections.abc import Collection, Sequence

from torch import nn

from .layers import Layer

_LEAST_BYTES = 64 * 1024 * 1024  # smaller ones are not worth a line


# Plain modules that a rank does not hold are let go by the engine, and it says so where the user's
# list still refers to them.
class ModulesElsewhere:
    """The modules among the layers that a rank does not hold."""

    def __init__(self, layers: Sequence[Layer], held: Collection[int]) -> None:
        mine = {id(p) for place in held for p in _parameters(layers[place])}
        self._left: list[tuple[weakref.ref[nn.Module], int]] = [
            (weakref.ref(layer), size)
            for place, layer in enumerate(layers)
            if place not in held and isinstance(layer, nn.Module)
            if (size := sum(p.nbytes for p in _parameters(layer) if id(p) not in mine))
        ]

    def told(self) -> str:
        """A sentence about those that somebody still refers to; "" where they are few. It is told
        once."""
        left, self._left = self._left, []
        if sum(size for _, size in left) < _LEAST_BYTES:
            return ""
        gc.collect()  # some may be in cycles that nobody refers to
        sizes = [size for layer, size in left if layer() is not None]
        if sum(sizes) < _LEAST_BYTES:
            return ""
        return (
            f"{len(sizes)} layers that other ranks hold take {sum(sizes) / 1e9:.2f} GB in this "
            "process, since something still refers to these modules. Give axrt.LayerSpec, or drop "
            "the model and its modules after axrt.initialize"
        )


def _parameters(layer: Layer) -> list[nn.Parameter]:
    return list(layer.parameters()) if isinstance(layer, nn.Module) else []
