"""The layers of a model without memory: modules whose tensors are on torch's meta device."""

import copy
from collections.abc import Iterator, Sequence
from typing import Self

import torch
from torch import Tensor, nn

from axrt.model.joints import ALONE, Team
from axrt.model.layers import (
    Function,
    Layer,
    LayerSpec,
    TiedLayerSpec,
    places_of,
    share,
    specification,
    tied_layer,
    without_memory,
)
from axrt.model.tensor_cuts import TensorCuts
from axrt.model.tensor_plan import Plan

META = torch.device("meta")


class Skeletons:
    """The skeletons of a model's layers. Layers of the same specification share one.

    Modules that are given as they are, are looked at when this is made: an engine changes them.

    Attributes:
        cuts: what a member of a team has of them, of those that were looked at.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers, self.cuts = layers, TensorCuts({}, ALONE)
        self._known: dict[tuple[object, ...], nn.Module] = {}
        self._first: dict[tuple[object, ...], int] = {}  # layer that was built
        memo: dict[int, object] = {}
        self._given = {
            place: _copied(layer, memo)
            for place, layer in enumerate(layers)
            if isinstance(layer, nn.Module)
        }

    def of_team(self, plan: Plan, team: Team, virtual: int = 1) -> Self:
        """The skeletons of a member's part of the layers, which has so many virtual members."""
        others = copy.copy(self)
        others.cuts, others._known = TensorCuts(plan, team, virtual), {}
        others._first = {}
        return others

    def key_of(self, place: int) -> tuple[object, ...]:
        """A key that is equal for layers that are built alike."""
        layer = self.layers[place]
        if isinstance(layer, LayerSpec) and not isinstance(layer, TiedLayerSpec):
            if not self.cuts.does_cut:
                return specification(layer)
            return (*specification(layer), self.cuts.of(place, layer.looked_at))
        return (place,)

    def layer(self, place: int) -> nn.Module:
        """The skeleton of layer `place`, to be looked at."""
        key = self.key_of(place)
        if key not in self._known:
            self._known[key] = self._built(place)
            self._first[key] = place
        elif self.cuts.does_cut and self._first[key] != place:
            self.cuts.note_alike(place, self._first[key])
        return self._known[key]

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters by their names in the model, each once, wherever it is tied or shared."""
        seen: set[int] = set()
        for place, layer in enumerate(self.layers):
            tied: Sequence[str] = ()
            if isinstance(layer, TiedLayerSpec) and places_of(self.layers, layer.key)[0] < place:
                tied = layer.tied
            for name, parameter in self.layer(place).named_parameters():
                is_built = isinstance(layer, LayerSpec)  # apart from others that are built alike
                if name not in tied and (is_built or id(parameter) not in seen):
                    seen.add(id(parameter))
                    yield f"{place}.{name}", parameter

    def _built(self, place: int) -> nn.Module:
        layer = self.layers[place]
        if isinstance(layer, nn.Module):
            return self._given[place]
        if not isinstance(layer, LayerSpec):
            return Function(layer)
        module = without_memory(layer)
        self.cuts.cut(place, module)
        if isinstance(layer, TiedLayerSpec):
            first = places_of(self.layers, layer.key)[0]
            if first < place:
                skeleton = without_memory(tied_layer(self.layers, first))
                share(self.layers, first, skeleton, place, module)
        return module


def _copied(module: nn.Module, memo: dict[int, object]) -> nn.Module:
    """A copy without memory, which shares with other copies what the modules share; the module
    itself where it cannot be copied."""
    try:
        for tensor in (*module.parameters(), *module.buffers()):
            if id(tensor) not in memo:
                memo[id(tensor)] = like(tensor, META)
        return copy.deepcopy(module, memo)
    except Exception:  # of a user's own class: its sizes are known all the same
        return module


def like(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of the same kind, shape and strides on another device, with the marks that a user
    may have put on it.

    Args:
        dtype: its type; None: the same.
    """
    made = torch.empty_strided(
        tensor.shape, _strides(tensor), dtype=dtype or tensor.dtype, device=device
    )
    if not isinstance(tensor, nn.Parameter):
        return made.requires_grad_(tensor.requires_grad)
    parameter = nn.Parameter(made, tensor.requires_grad)
    parameter.__dict__.update(tensor.__dict__)
    return parameter


def _strides(tensor: Tensor) -> tuple[int, ...]:
    if tensor.layout is torch.strided and not tensor.is_nested:
        return tensor.stride()
    return torch.empty(tensor.shape, device=META).stride()
