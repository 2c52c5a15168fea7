"""Cuts the weights of layers that the members of a team share out: each has its part."""

#   column   a member has some of the outputs: rows of the weight, and of the bias
#   row      a member has some of the inputs: columns of the weight. What it computes are addends
#            of all outputs, so the bias is with the first member alone
#   vocabulary  as a column; of an embedding, some of its rows
#
# A layer is built whole, with the weights that it has on one rank, and then cut. So what a run
# begins from does not depend on the number of members.

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from axrt.errors import ModelError

from .joints import Team
from .tensor_plan import DIVIDE, ROW, Plan, blocks_of, cuts_in, divided_in


class Part(NamedTuple):
    """What the members of a team have of a parameter."""

    dim: int | None  # dimension along which it is cut; None: the first member has all of it
    shape: torch.Size  # shape of the whole
    team: Team  # this member, and how many share it out
    blocks: tuple[int, ...] = ()  # sizes along the dimension of blocks that are cut each

    @property
    def is_here(self) -> bool:
        """This member has some of it."""
        return self.dim is not None or self.team.member == 0

    def of(self, whole: Tensor) -> Tensor:
        """What this member has of a tensor; all of one that has another shape, as a count of steps
        has."""
        return self.of_member(self.team.member, whole)

    def of_member(self, member: int, whole: Tensor) -> Tensor:
        """The same of any member."""
        if self.dim is None or whole.shape != self.shape:
            return whole
        blocks = torch.split(whole, list(self.blocks), self.dim)
        parts = [block.chunk(self.team.size, self.dim)[member] for block in blocks]
        return torch.cat(parts, self.dim)

    def of_all(self, whole: Tensor) -> list[Tensor]:
        """What each member has of a tensor."""
        if self.dim is None:
            return [whole]
        return [self.of_member(member, whole) for member in range(self.team.size)]

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """The tensor, from what each member has of it; the first one's where it is a count, or is
        not cut.

        Raises:
            ModelError: they do not come to the whole.
        """
        if self.dim is None or not parts[0].dim():
            return parts[0]
        if any(self._widened(part.shape) != self.shape for part in parts):
            raise ModelError(
                f"parts of shape {tuple(parts[0].shape)} do not come to {tuple(self.shape)}, the "
                "shape of a weight that members of a team share out"
            )
        mine = [width // self.team.size for width in self.blocks]
        of_members = [torch.split(part, mine, self.dim) for part in parts]
        blocks = [block for of_all in zip(*of_members, strict=True) for block in of_all]
        return torch.cat(blocks, self.dim)

    def _widened(self, shape: torch.Size) -> torch.Size:
        sizes = [size * self.team.size if d == self.dim else size for d, size in enumerate(shape)]
        return torch.Size(sizes)


Parts = Mapping[str, Part]  # by name of the parameter
NOTHING_CUT: Parts = MappingProxyType({})


class TensorCuts:
    """Cuts the layers of a stage as they are built; `check_cuts` has found that they can be.

    Args:
        plan: what the model says.
        team: this member, and how many share them out.
        virtual: number of virtual members of this member.
    Attributes:
        team, virtual: the same.
        parts: what the members have of each parameter that was cut.
        virtual_parts: what the virtual members here have of each parameter that they cut, the first
            of them as the one whose part it is; {} where there is one alone.
    """

    def __init__(self, plan: Plan, team: Team, virtual: int = 1) -> None:
        self._plan, self.team, self.virtual = plan, team, virtual
        self.parts: dict[str, Part] = {}
        self.virtual_parts: dict[str, Part] = {}

    @property
    def does_cut(self) -> bool:
        """Some parameters may be shared out."""
        return self.team.size > 1 or self.virtual > 1

    def of(self, place: int, layer: nn.Module) -> tuple[tuple[str, str], ...]:
        """What is cut of a layer that is whole, by the names within it, and how: equal for layers
        that are cut alike."""
        prefix = str(place)
        return tuple(
            (path.removeprefix(prefix), way)
            for path, module in layer.named_modules(prefix=prefix)
            for way in (
                *(way for _, way in cuts_in(self._plan, path)),
                *(f"{DIVIDE} {name}" for _, name in divided_in(self._plan, path, module)),
            )
        )

    def note_alike(self, place: int, other: int) -> None:
        """Note that layer `place` is cut as layer `other`, which was cut before."""
        begins, instead = f"{other}.", f"{place}."
        for parts in (self.parts, self.virtual_parts):
            alike = {name: part for name, part in parts.items() if name.startswith(begins)}
            parts |= {instead + name.removeprefix(begins): of for name, of in alike.items()}

    def cut(self, place: int, layer: nn.Module) -> None:
        """Cut what the plan names in a layer."""
        if self.team.size > 1:
            self._cut_layer(place, layer)
        if self.virtual > 1:
            self._note_virtual(place, layer)

    def _note_virtual(self, place: int, layer: nn.Module) -> None:
        """Note what virtual members have of this member's part of a layer."""
        for path, module in layer.named_modules(prefix=str(place)):
            for _, way in cuts_in(self._plan, path):
                assert isinstance(module, nn.Linear | nn.Embedding)
                mine = _parts_of(module, way, Team(0, self.virtual), self.team.size)
                self.virtual_parts |= {f"{path}.{name}": part for name, part in mine.items()}

    def _cut_layer(self, place: int, layer: nn.Module) -> None:
        for path, module in layer.named_modules(prefix=str(place)):
            for _, way in cuts_in(self._plan, path):
                assert isinstance(module, nn.Linear | nn.Embedding)
                self._cut(path, module, way)
            for _, name in divided_in(self._plan, path, module):
                value, size = getattr(module, name), self.team.size
                whole = isinstance(value, tuple)
                setattr(module, name, tuple(n // size for n in value) if whole else value // size)

    def _cut(self, path: str, module: nn.Linear | nn.Embedding, way: str) -> None:
        bias = getattr(module, "bias", None)
        is_trained = bias is not None and bias.requires_grad
        parts = _parts_of(module, way, self.team)
        for name, parameter in list(module.named_parameters()):
            part = parts[name]
            self.parts[f"{path}.{name}"] = part
            mine = _parameter(part.of(parameter), parameter) if part.is_here else None
            module.register_parameter(name, mine)
        if isinstance(module, nn.Embedding):
            module.num_embeddings = len(module.weight)
            return
        module.out_features, module.in_features = module.weight.shape
        if is_trained and module.bias is None:
            module.register_forward_hook(_wanting_gradient)


def _parts_of(
    module: nn.Linear | nn.Embedding, way: str, team: Team, cut_before: int = 1
) -> dict[str, Part]:
    """What members have of each parameter of a module, by its name there.

    Args:
        way: word of the plan.
        cut_before: number of members of which one has what the module has.
    """
    dims = {"weight": 1, "bias": None} if way == ROW else {"weight": 0, "bias": 0}
    rows, inputs = module.weight.shape
    widths: tuple[int, ...] = (inputs,)
    if way != ROW:
        widths = tuple(width // cut_before for width in blocks_of(way, rows * cut_before))
    return {
        name: Part(dims[name], parameter.shape, team, widths)
        for name, parameter in module.named_parameters()
    }


def _wanting_gradient(rows: nn.Module, given: tuple[Any, ...], addends: Tensor) -> Tensor:
    """Addends that want a gradient as those of the first member do, which has a bias to train: all
    members come to a joint with the same."""
    if addends.requires_grad or not torch.is_grad_enabled():
        return addends
    return addends.detach().requires_grad_()


def _parameter(part: Tensor, of: nn.Parameter) -> nn.Parameter:
    own = part.detach().clone(memory_format=torch.contiguous_format)
    made = nn.Parameter(own, requires_grad=of.requires_grad)
    made.__dict__.update(of.__dict__)  # marks that factories of optimizers look at
    return made
