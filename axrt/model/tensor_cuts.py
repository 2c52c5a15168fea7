"""Weights of layers that members of a team share out: each has its part of a matrix."""

#   column   a member has some of the outputs: rows of the weight, and of the bias
#   row      a member has some of the inputs: columns of the weight. What it computes are addends
#            of all outputs, so the bias is with the first member alone
#
# A layer is built whole, with the weights that it has on one rank, and then cut. So what a run
# begins from does not depend on the number of members.

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from axrt.errors import ConfigError, ModelError
from axrt.scheduler.plural import plural

from .in_pieces import InPieces
from .joints import Team
from .layers import Layer, LayerSpec, TiedLayerSpec, without_memory
from .team_layers import LOSS, TOKEN

if TYPE_CHECKING:
    from .module import PipelineModule


class Part(NamedTuple):
    """What the members of a team have of a parameter."""

    dim: int | None  # dimension along which it is cut; None: the first member has all of it
    shape: torch.Size  # shape of the whole
    team: Team  # this member, and how many share it out

    @property
    def is_here(self) -> bool:
        """This member has some of it."""
        return self.dim is not None or self.team.member == 0

    def of(self, whole: Tensor) -> Tensor:
        """What this member has of a tensor; all of one that has another shape, as a count of steps
        has."""
        if self.dim is None or whole.shape != self.shape:
            return whole
        return whole.chunk(self.team.size, self.dim)[self.team.member]

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """The tensor, from what each member has of it; the first one's where it is a count, or is
        not cut.

        Raises:
            ModelError: they do not come to the whole.
        """
        if self.dim is None or not parts[0].dim():
            return parts[0]
        together = torch.cat(list(parts), self.dim)
        if together.shape != self.shape:
            raise ModelError(
                f"parts of shape {tuple(parts[0].shape)} come to {tuple(together.shape)}; expected "
                f"{tuple(self.shape)}, that of a weight that members of a team share out"
            )
        return together


Parts = Mapping[str, Part]  # by name of the parameter


COLUMN, ROW = "column", "row"
WAYS = (COLUMN, ROW, TOKEN)


def check_plan(plan: Mapping[str, str]) -> None:
    """Check the words in what a model says of its matrices.

    Raises:
        ConfigError: a way is none of `WAYS`.
    """
    for pattern, way in plan.items():
        known = (TOKEN,) if pattern == LOSS else WAYS
        if way not in known:
            raise ConfigError(
                f"tensor: {pattern!r} is {way!r}; expected one of {', '.join(map(repr, known))}"
            )


def check_cuts(model: "PipelineModule", size: int) -> None:
    """Check that the members of a team can share out a model as it says.

    Args:
        size: number of members.
    Raises:
        ConfigError: it says nothing, names nothing that is there, or names what cannot be cut.
    """
    if size == 1:
        return
    if not model.tensor:
        raise ConfigError(
            f"parallel.tensor = {size}, and the model says nothing of how its matrices are shared "
            "out; expected PipelineModule(..., tensor={'*.up': 'column', '*.down': 'row'}), with "
            "the names of its own, or parallel.tensor = 1"
        )
    names = {LOSS}  # of all that a pattern may mean
    cuts: dict[str, str] = {}  # the pattern that cuts a module, by its name
    for place, layer in enumerate(model.layers):
        names.add(str(place))
        module = without_memory(layer) if isinstance(layer, LayerSpec) else layer
        if isinstance(module, nn.Module):
            for path, one in module.named_modules(prefix=str(place)):
                names.add(path)
                for pattern, way in _cutting(model.tensor, path):
                    _check_cut(path, one, way, size)
                    _check_layer(place, path, module, layer)
                    if path in cuts:
                        raise ConfigError(
                            f"tensor: both {cuts[path]!r} and {pattern!r} name {path}; expected one"
                        )
                    cuts[path] = pattern
            _check_shared(place, module, cuts)
    for pattern, way in model.tensor.items():
        layers = [str(place) for place in range(len(model.layers))]
        fits = [LOSS, *layers] if way == TOKEN else sorted(names - {LOSS})
        if not any(fnmatchcase(name, pattern) for name in fits):
            near = get_close_matches(pattern, fits, n=1, cutoff=0.3)
            hint = f"; the nearest is {near[0]!r}" if near else ""
            what = "the index of a layer, or 'loss'" if way == TOKEN else "the name of a module"
            raise ConfigError(f"tensor: {pattern!r} matches nothing; expected {what}{hint}")


def _cutting(plan: Mapping[str, str], path: str) -> Iterator[tuple[str, str]]:
    """The patterns that cut a module, and how."""
    for pattern, way in plan.items():
        if way != TOKEN and fnmatchcase(path, pattern):
            yield pattern, way


def _check_cut(path: str, module: nn.Module, way: str, size: int) -> None:
    if type(module) is not nn.Linear:
        raise ConfigError(
            f"tensor: {path} is a {type(module).__name__}; expected an nn.Linear to cut by {way}"
        )
    width, of = (
        (module.out_features, "outputs") if way == COLUMN else (module.in_features, "inputs")
    )
    if width % size:
        raise ConfigError(
            f"tensor: {path} has {width} {of}, and parallel.tensor = {size}; expected a width that "
            f"{plural(size, 'member')} share out evenly"
        )


def _check_layer(place: int, path: str, module: nn.Module, layer: Layer) -> None:
    if not isinstance(layer, LayerSpec):
        raise ConfigError(
            f"tensor: {path} is in a module that is given as it is, which would lose what other "
            f"members have; expected layer {place} as an axrt.LayerSpec"
        )
    if isinstance(layer, TiedLayerSpec):
        raise ConfigError(
            f"tensor: {path} is in a tied layer, whose weights all its layers have whole; expected "
            "modules of other layers"
        )
    if not isinstance(module, InPieces):
        raise ConfigError(
            f"tensor: {path} is in layer {place}, a {type(module).__name__}, which does not say "
            "where its slices travel; expected an axrt.InPieces with axrt.Sum behind a matrix that "
            "is cut by rows"
        )


def _check_shared(place: int, layer: nn.Module, cuts: Mapping[str, str]) -> None:
    """Check that no parameter that is cut has a second name."""
    names: dict[int, list[str]] = {}
    for name, parameter in layer.named_parameters(prefix=str(place), remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for of_one in names.values():
        if len(of_one) > 1 and any(name.rpartition(".")[0] in cuts for name in of_one):
            raise ConfigError(
                f"tensor: {of_one[0]} and {of_one[1]} are one parameter, and it is cut; expected a "
                "parameter of its own"
            )


class TensorCuts:
    """Cuts the layers of a stage as they are built; `check_cuts` has found that they can be.

    Args:
        plan: way to cut linear modules, by a pattern of their names, `layer.path`.
        team: this member, and how many share them out.
    Attributes:
        parts: what the members have of each parameter that was cut.
    """

    def __init__(self, plan: Mapping[str, str], team: Team) -> None:
        self._plan, self._team = plan, team
        self.parts: dict[str, Part] = {}

    def cut(self, place: int, layer: nn.Module) -> None:
        """Cut what the plan names in a layer."""
        if self._team.size == 1:
            return
        for path, module in layer.named_modules(prefix=str(place)):
            for _, way in _cutting(self._plan, path):
                assert isinstance(module, nn.Linear)
                self._cut(path, module, way)

    def _cut(self, path: str, module: nn.Linear, way: str) -> None:
        dims = {"weight": 0, "bias": 0} if way == COLUMN else {"weight": 1, "bias": None}
        for name, parameter in list(module.named_parameters()):
            part = Part(dims[name], parameter.shape, self._team)
            self.parts[f"{path}.{name}"] = part
            mine = _parameter(part.of(parameter), parameter) if part.is_here else None
            module.register_parameter(name, mine)
        if way == COLUMN:
            module.out_features = module.weight.shape[0]
        else:
            module.in_features = module.weight.shape[1]


def _parameter(part: Tensor, of: nn.Parameter) -> nn.Parameter:
    own = part.detach().clone(memory_format=torch.contiguous_format)
    return nn.Parameter(own, requires_grad=of.requires_grad)
