"""Layers: modules, specifications of modules that are built where they are needed, and plain functions."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .seeds import initial_seed_of


class LayerSpec:
    """A layer that is not built yet; only the ranks that hold it build it.

    Args:
        typename: the module's class.
        *args, **kwargs: what it is called with. Its weights depend on (seed, place of the layer) alone.
    """

    def __init__(self, typename: type[nn.Module], *args: Any, **kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise TypeError(f"LayerSpec takes a subclass of torch.nn.Module first, got {typename!r}; plain functions need no LayerSpec")
        self.typename = typename
        self.args = args
        self.kwargs = kwargs

    def build(self) -> nn.Module:
        """The module, with whatever torch's generator gives now."""
        return self.typename(*self.args, **self.kwargs)

    def __repr__(self) -> str:
        words = [repr(arg) for arg in self.args] + [f"{key}={value!r}" for key, value in self.kwargs.items()]
        return f"LayerSpec({self.typename.__name__}{''.join(', ' + word for word in words)})"


class Function(nn.Module):
    """A plain function as a layer."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, value: Any) -> Any:
        return self.function(value)

    def extra_repr(self) -> str:
        return getattr(self.function, "__qualname__", repr(self.function))


Layer = nn.Module | LayerSpec | Callable[[Any], Any]


def name_of(layer: Layer) -> str:
    """The class of a layer, or the name of a function."""
    if isinstance(layer, LayerSpec):
        return layer.typename.__name__
    return type(layer).__name__ if isinstance(layer, nn.Module) else getattr(layer, "__name__", type(layer).__name__)


def build(layer: Layer, index: int, seed: int) -> nn.Module:
    """Layer `index` of the model as a module; torch's generator is afterwards where it was.

    A `LayerSpec` is built under the seed of (seed, index). A module is taken as it is.
    """
    if isinstance(layer, LayerSpec):
        with torch.random.fork_rng(devices=[]):  # built on the CPU, wherever it runs
            torch.default_generator.manual_seed(initial_seed_of(seed, index))
            return layer.build()
    return layer if isinstance(layer, nn.Module) else Function(layer)


def _without_memory(layer: LayerSpec) -> nn.Module:
    try:
        with torch.device("meta"):
            return layer.build()
    except (RuntimeError, NotImplementedError):  # its constructor looks at values
        return layer.build()


def num_parameters(layer: Layer) -> int:
    """How many elements the parameters of a layer have, counted without allocating them where its constructor allows that."""
    if isinstance(layer, LayerSpec):
        with torch.random.fork_rng(devices=[]):
            layer = _without_memory(layer)
    return sum(p.numel() for p in layer.parameters()) if isinstance(layer, nn.Module) else 0
