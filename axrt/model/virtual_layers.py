"""The layers that the virtual members of a rank compute with."""

# Buckets step what a rank has of each layer, as they do where a rank is one member. Virtual members
# have layers of their own, with the shapes that they would have on as many ranks. What a layer has
# whole is the same memory in each of them, and what is cut are copies, which are taken anew in each
# step: rows or columns of a matrix have other strides and alignment, and bits may depend on those.
# A layer of which nothing is cut is, for the first virtual member, the rank's own.
#
# Of what a user does to the rank's own modules between steps, copies take weights, buffers, whether
# they train, and numbers and words that are set on modules of which nothing is cut. Hooks that come
# later would be heard by some of them, and are refused.

from collections.abc import Iterable, Sequence
from copy import deepcopy
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from axrt.errors import ConfigError, ModelError

from .accumulator import Accumulator
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
        parts: what virtual members have of each parameter that they cut, see `TensorCuts`.
    Attributes:
        of_members: the layers of each virtual member.
    """

    def __init__(self, own: Sequence[nn.Module], first: int, parts: Parts) -> None:
        self._own, self._first, self._parts = own, first, parts
        self.of_members: list[list[nn.Module]] = []
        self._are_fresh = False
        self._hooks: list[int] = []

    def add(self, layers: Sequence[nn.Module]) -> None:
        """Add a virtual member, with the weights that its rank has now."""
        self.of_members.append(list(layers))
        self._take(len(self.of_members) - 1)

    @cached_property
    def _named(self) -> list[dict[str, nn.Parameter]]:
        return [
            {
                name: parameter
                for place, layer in enumerate(layers, self._first)
                for name, parameter in layer.named_parameters(
                    prefix=str(place), remove_duplicate=False
                )
            }
            for layers in self.of_members
        ]

    def parameters(self, name: str) -> list[nn.Parameter | None]:
        """The parameter of each virtual member that stands for one of the rank's own; None where it
        has no part of that.

        Args:
            name: its name in the model.
        """
        return [named.get(name) for named in self._named]

    def part_of(self, name: str) -> Part | None:
        """What virtual members have of a parameter; None: all of it, or the first one alone."""
        part = self._parts.get(name)
        return part if part is not None and part.dim is not None else None

    def note_hooks(self) -> None:
        """Note which hooks the rank's own layers have, now that a run begins."""
        self._hooks = _hooks_of(self._own)

    def let_change(self) -> None:
        """Weights may change from now on, until `refresh`."""
        self._are_fresh = False

    @torch.no_grad()
    def refresh(self) -> None:
        """Take weights, buffers and modes as they are now, if they may have changed.

        Raises:
            ModelError: there are hooks that the layers of virtual members have not.
        """
        if self._are_fresh:
            return
        if _hooks_of(self._own) != self._hooks:
            raise ModelError(
                "hooks were put on weights or modules after the start, which not all virtual "
                "members of a rank would hear (parallel.tensor_shards); expected them in the "
                "constructor of a layer, or parallel.tensor_shards = 0"
            )
        for member in range(len(self.of_members)):
            self._take(member)
        self._are_fresh = True

    def _take(self, member: int) -> None:
        layers = zip(self._own, self.of_members[member], strict=True)
        for place, (own, layer) in enumerate(layers, self._first):
            if layer is not own:
                self._take_layer(member, str(place), own, layer)

    def _take_layer(self, member: int, place: str, own: nn.Module, layer: nn.Module) -> None:
        theirs = dict(own.named_parameters(prefix=place, remove_duplicate=False))
        for name, parameter in layer.named_parameters(prefix=place, remove_duplicate=False):
            whole, part = theirs[name].detach(), self.part_of(name)
            if parameter.requires_grad != theirs[name].requires_grad:
                parameter.requires_grad_(theirs[name].requires_grad)
            if part is None:
                parameter.data = whole
                continue
            mine = part.of_member(member, whole)
            if _is_alike(parameter, mine):
                parameter.data.copy_(mine)
            else:
                parameter.data = mine
        is_cut = any(name in self._parts for name in theirs)
        copied: dict[int, Tensor] = {}  # several names may be those of one buffer
        for module, of in zip(layer.modules(), own.modules(), strict=True):
            _take_buffers(module, of, copied)
            module.training = of.training
            if not is_cut:
                vars(module).update({k: one for k, one in vars(of).items() if type(one) in _PLAIN})


_PLAIN = (bool, int, float, str, type(None))


def _take_buffers(module: nn.Module, of: nn.Module, copied: dict[int, Tensor]) -> None:
    """Let a module have the buffers of another one; those that fit keep their memory, which may
    have other names."""
    for name, buffer in of._buffers.items():
        mine = module._buffers.get(name)
        if buffer is None:
            module._buffers[name] = None
        elif mine is not None and _is_alike(mine, buffer):
            mine.data.copy_(buffer)
        else:
            module._buffers[name] = copied.setdefault(id(buffer), buffer.detach().clone())


def _is_alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def _hooks_of(layers: Iterable[nn.Module]) -> list[int]:
    """How many hooks there are, of each kind."""
    of_modules = [
        len(getattr(module, name))
        for layer in layers
        for module in layer.modules()
        for name in _HOOKS
    ]
    of_weights = [
        len(getattr(parameter, name, None) or ())
        for layer in layers
        for parameter in layer.parameters()
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks")
    ]
    return of_modules + of_weights


def _copied(own: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A copy of a module, with the hooks on its weights, which copies of tensors have not.

    Args:
        memo: what has been copied by now, see `copy.deepcopy`.
    """
    known = set(memo)
    made = deepcopy(own, memo)
    for parameter in own.parameters():
        if id(parameter) in known:
            continue
        mine = memo[id(parameter)]
        for hook in (parameter._backward_hooks or {}).values():
            mine.register_hook(hook)
        for hook in (parameter._post_accumulate_grad_hooks or {}).values():
            if not isinstance(hook, Accumulator):  # which is the bucket's
                mine.register_post_accumulate_grad_hook(hook)
    return made


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class VirtualBuilder:
    """Builds the layers of virtual members.

    Args:
        layers: layers of the whole model.
        plan: what the model says of how they are cut.
        team: this member of the team, and how many there are.
        virtual: number of virtual members of each.
        types: types of the run.
    Attributes:
        teams: for each virtual member which of all it is, and how many there are.
    """

    def __init__(
        self, layers: Sequence[Layer], plan: Plan, team: Team, virtual: int, types: Types
    ) -> None:
        self._layers, self._plan, self._types = layers, plan, types
        first, size = team.member * virtual, team.size * virtual
        self.teams = [Team(first + place, size) for place in range(virtual)]

    def build(
        self, own: Sequence[nn.Module], first: int, parts: Parts, seed: int, to: torch.device
    ) -> VirtualLayers:
        """The layers of one stage.

        Args:
            own: layers of the stage as buckets step them, after those have taken them.
            first: index of the first of them in the model.
            parts: see `VirtualLayers`.
            to: device that they compute on.
        """
        made = VirtualLayers(own, first, parts)
        for place, team in enumerate(self.teams):
            layers, memo = [], dict[int, Any]()  # what given layers have in common is copied once
            for at, of in enumerate(own, first):
                is_own = place == 0 and not self._is_cut(at, of)
                layers.append(of if is_own else self._built(at, team, seed, of, memo).to(to))
            made.add(layers)
        return made

    def _is_cut(self, place: int, layer: nn.Module) -> bool:
        """Virtual members have other shapes or attributes of a layer than their rank."""
        divided = any(
            any(divided_in(self._plan, path, module))
            for path, module in layer.named_modules(prefix=str(place))
        )
        return divided or any(True for _ in cut_modules(self._plan, place, layer))

    def _built(
        self, place: int, team: Team, seed: int, own: nn.Module, memo: dict[int, Any]
    ) -> nn.Module:
        if not isinstance(self._layers[place], LayerSpec):
            try:
                return _copied(own, memo)
            except Exception as error:  # of a user's own class
                raise ConfigError(
                    f"layer {place}, a {type(own).__name__} that is given as it is, cannot be "
                    f"copied ({type(error).__name__}: {error}), and each virtual member of a rank "
                    "has one (parallel.tensor_shards); expected an axrt.LayerSpec, or "
                    "parallel.tensor_shards = 0"
                ) from error
        layer = build(self._layers, place, seed)
        TensorCuts(self._plan, team).cut(place, layer)
        if self._types.weights:
            NarrowLayers(self._types).add(layer)
        return layer
