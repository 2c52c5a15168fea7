"""The layers that the virtual members of a rank compute with."""

# Buckets step what a rank has of each layer, as they do where nobody shares it out further. Virtual
# members have layers of their own, with the shapes that V ranks would have. What a layer has whole
# is the same memory in each of them, and what is cut are copies, which are taken anew in each step:
# rows or columns of a matrix have other strides and alignment, and bits may depend on those. A
# layer of which nothing is cut is, for the first virtual member, the rank's own.

from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import nn

from .joints import Team
from .layers import Layer, LayerSpec, build
from .precision import NarrowLayers, Types
from .tensor_cuts import Part, Parts, TensorCuts
from .tensor_plan import Plan, cut_modules, divided_in


class VirtualLayers:
    """The layers of the virtual members of a rank, on one stage.

    Args:
        own: layers of the stage as buckets step them.
        first: index of the first of them in the model.
        shares: what virtual members have of each parameter that they cut, see `TensorCuts`.
    Attributes:
        of_members: the layers of each virtual member.
    """

    def __init__(self, own: Sequence[nn.Module], first: int, shares: Parts) -> None:
        self._own, self._first, self._shares = own, first, shares
        self.of_members: list[list[nn.Module]] = []
        self._are_fresh = False

    def add(self, layers: Sequence[nn.Module]) -> None:
        """Add a virtual member, with the weights that its rank has now."""
        self.of_members.append(list(layers))
        self._take(len(self.of_members) - 1)

    def parameters(self, name: str) -> list[nn.Parameter | None]:
        """The parameter of each virtual member that stands for one of the rank's own; None where it
        has no part of that.

        Args:
            name: its name in the model.
        """
        place, _, within = name.partition(".")
        index = int(place) - self._first
        return [dict(of[index].named_parameters()).get(within) for of in self.of_members]

    def share_of(self, name: str) -> Part | None:
        """What virtual members have of a parameter; None: all of it, or the first one alone."""
        share = self._shares.get(name)
        return share if share is not None and share.dim is not None else None

    def stale(self) -> None:
        """Weights may be stepped from now on."""
        self._are_fresh = False

    def refresh(self) -> None:
        """Take weights and buffers as they are now, once in a step."""
        if not self._are_fresh:
            self.take()
        self._are_fresh = True

    @torch.no_grad()
    def take(self) -> None:
        """Take weights and buffers as they are now."""
        for member in range(len(self.of_members)):
            self._take(member)

    def _take(self, member: int) -> None:
        for place, (own, layer) in enumerate(
            zip(self._own, self.of_members[member], strict=True), self._first
        ):
            if layer is not own:
                self._take_layer(member, str(place), own, layer)

    def _take_layer(self, member: int, place: str, own: nn.Module, layer: nn.Module) -> None:
        theirs = dict(own.named_parameters(prefix=place, remove_duplicate=False))
        for name, parameter in layer.named_parameters(prefix=place, remove_duplicate=False):
            whole = theirs[name].detach()
            share = self.share_of(name)
            if share is None:
                parameter.data = whole
                continue
            part = share._replace(team=Team(member, share.team.size)).of(whole)
            if parameter.dtype == part.dtype and parameter.device == part.device:
                parameter.data.copy_(part)
            else:
                parameter.data = part
        for module, of in zip(layer.modules(), own.modules(), strict=True):
            for name, buffer in of._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.detach().clone()


class VirtualBuilder:
    """Builds the layers of virtual members.

    Args:
        layers: layers of the whole model.
        plan: what the model says of how they are cut.
        team: this member of the team, and how many there are.
        here: number of virtual members of each.
        types: types of the run.
    """

    def __init__(
        self, layers: Sequence[Layer], plan: Plan, team: Team, here: int, types: Types
    ) -> None:
        self._layers, self._plan, self._types = layers, plan, types
        self.teams = [Team(team.member * here + place, team.size * here) for place in range(here)]

    def build(
        self, own: Sequence[nn.Module], first: int, shares: Parts, seed: int, to: torch.device
    ) -> VirtualLayers:
        """The layers of one stage.

        Args:
            own: layers of the stage as buckets step them, after those have taken them.
            first: index of the first of them in the model.
            shares: see `VirtualLayers`.
            to: device that they compute on.
        """
        made = VirtualLayers(own, first, shares)
        for place, team in enumerate(self.teams):
            layers = []
            for at, of in enumerate(own, first):
                is_own = place == 0 and not self._is_cut(at, of)
                layers.append(of if is_own else self._built(at, team, seed, of).to(to))
            made.add(layers)
        return made

    def _is_cut(self, place: int, layer: nn.Module) -> bool:
        """Virtual members have other shapes or attributes of a layer than their rank."""
        divided = any(
            any(divided_in(self._plan, path, module))
            for path, module in layer.named_modules(prefix=str(place))
        )
        return divided or any(True for _ in cut_modules(self._plan, place, layer))

    def _built(self, place: int, team: Team, seed: int, own: nn.Module) -> nn.Module:
        if not isinstance(self._layers[place], LayerSpec):
            return deepcopy(own)
        layer = build(self._layers, place, seed)
        TensorCuts(self._plan, team).cut(place, layer)
        if self._types.weights:
            NarrowLayers(self._types).add(layer)
        return layer
