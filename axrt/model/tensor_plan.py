"""What a model says of how the members of a team share it out: words by names, checked before
anything is built."""

#   "*.up": "column"                   a member has some of the outputs of a linear module
#   "*.qkv": "column:3"                some of each of three equal blocks of its outputs, or
#            "column:64,16,16"         of blocks of these sizes
#   "*.down": "row"                    a member has some of its inputs
#   "*.head": "vocabulary"             a member has some of the logits that the model ends with, or
#   "0": "vocabulary"                  some of the rows of an embedding that is a layer
#   "*.attention.heads": "divide"      an attribute, one number or several, is that of a member
#   "5": "token", "loss": "token"      a layer, or the loss, takes each token by itself

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from axrt.config import Parallel
from axrt.errors import ConfigError

from .in_pieces import Jointed
from .layers import Layer, LayerSpec, TiedLayerSpec, without_memory
from .loss import Loss
from .pausing import check_can_pause

if TYPE_CHECKING:
    from .module import PipelineModule

COLUMN, ROW, VOCABULARY, DIVIDE, TOKEN = "column", "row", "vocabulary", "divide", "token"
WAYS = (COLUMN, ROW, VOCABULARY, DIVIDE, TOKEN)
LOSS = "loss"  # names the loss in a plan
Plan = Mapping[str, str]  # words by pattern of names


def blocks_of(way: str, outputs: int) -> tuple[int, ...]:
    """The sizes of the blocks of a linear module's outputs, each of which is cut.

    >>> blocks_of("column:3", 12), blocks_of("column:8,2,2", 12), blocks_of("column", 12)
    ((4, 4, 4), (8, 2, 2), (12,))

    Raises:
        ValueError: the word has no such numbers.
    """
    numbers = tuple(map(int, way.partition(":")[2].split(","))) if ":" in way else (1,)
    if min(numbers) < 1:
        raise ValueError("a number below 1")
    return (outputs // numbers[0],) * numbers[0] if len(numbers) == 1 else numbers


def cuts_in(plan: Plan, path: str) -> Iterator[tuple[str, str]]:
    """The patterns that cut a module, each with its word."""
    for pattern, way in plan.items():
        if way not in (TOKEN, DIVIDE) and fnmatchcase(path, pattern):
            yield pattern, way


def cut_modules(
    plan: Plan, place: int, layer: nn.Module
) -> Iterator[tuple[str, nn.Module, str, str]]:
    """What is cut of a layer: the name of a module, the module, the pattern and its word.

    Args:
        place: index of the layer in the model.
    """
    for path, module in layer.named_modules(prefix=str(place)):
        for pattern, way in cuts_in(plan, path):
            yield path, module, pattern, way


def divided_in(plan: Plan, path: str, module: nn.Module) -> Iterator[tuple[str, str]]:
    """The patterns that divide an attribute of a module, each with the attribute's name."""
    for pattern, way in plan.items():
        of, _, name = pattern.rpartition(".")
        if way == DIVIDE and fnmatchcase(path, of) and name in vars(module):
            yield pattern, name


def check_plan(plan: Plan) -> None:
    """Check the words of a plan.

    Raises:
        ConfigError: one is none of `WAYS`.
    """
    for pattern, way in plan.items():
        known = (TOKEN,) if pattern == LOSS else WAYS
        word, colon, _ = way.partition(":")
        try:
            is_known = word in known and (not colon or word == COLUMN) and bool(blocks_of(way, 1))
        except ValueError:
            is_known = False
        if not is_known:
            raise ConfigError(
                f"tensor: {pattern!r} is {way!r}; expected one of {', '.join(map(repr, known))}"
                + ", or 'column:3' for three blocks" * (pattern != LOSS)
            )


def check_cuts(model: "PipelineModule", parallel: Parallel) -> None:
    """Check that the members of a team can share out a model as it says.

    Args:
        parallel: layout of ranks, which says into how many parts.
    Raises:
        ConfigError: it says nothing, names nothing that is there, or names what cannot be cut.
    """
    size = parallel.virtual_members
    if size == 1:
        return
    key, off = parallel.cut_by
    if not model.tensor:
        raise ConfigError(
            f"{key} = {size}, and the model says nothing of how its matrices are shared "
            "out; expected PipelineModule(..., tensor={'*.up': 'column', '*.down': 'row'}), with "
            f"the names of its own, or {key} = {off}"
        )
    check = _Check(model.tensor, size, key)
    for place, layer in enumerate(model.layers):
        check.layer(place, layer)
    check.vocabulary(len(model.layers) - 1, isinstance(model.layers[-1], Loss))
    check.all_matched(len(model.layers))


class _Check:
    """Goes through the layers of a model."""

    def __init__(self, plan: Plan, size: int, key: str) -> None:
        self._plan, self._size, self._key = plan, size, key
        self._names: set[str] = set()  # of all modules
        self._cut_by: dict[str, str] = {}  # the pattern that cuts a module, by its name
        self._vocabulary: list[str] = []  # modules that make a part of the logits
        self._matched: set[str] = set()

    def layer(self, place: int, layer: Layer) -> None:
        """Check a layer."""
        module = without_memory(layer) if isinstance(layer, LayerSpec) else layer
        if not isinstance(module, nn.Module):
            return
        self._batch_norm(place, module)
        for path, one in module.named_modules(prefix=str(place)):
            self._names.add(path)
            for pattern, way in cuts_in(self._plan, path):
                self._cut(path, one, way)
                _check_layer(place, path, module, layer)
                self._one_pattern(path, pattern)
            for pattern, name in divided_in(self._plan, path, one):
                self._divided(f"{path}.{name}", getattr(one, name))
                _check_layer(place, path, module, layer)
                self._one_pattern(f"{path}.{name}", pattern)
        self._shared(place, module)
        self._makes_logits(place, module)
        self._has_rows(place, module)

    def _makes_logits(self, place: int, layer: nn.Module) -> None:
        """Note what makes a part of the logits, which is to be all that is cut of its layer."""
        cut = list(cut_modules(self._plan, place, layer))
        mine = [path for path, _, _, way in cut if way == VOCABULARY]
        if not mine or isinstance(layer, nn.Embedding):
            return
        by_tokens = self._plan.get(str(place)) == TOKEN
        if len(cut) > 1 or isinstance(layer, Jointed) or by_tokens:
            raise ConfigError(
                f"tensor: {mine[0]} is cut by 'vocabulary', and its layer has pieces, other "
                "matrices that are cut, or the word 'token'; expected a layer of its own"
            )
        self._vocabulary += mine

    def _has_rows(self, place: int, layer: nn.Module) -> None:
        """Check that what a layer without pieces makes of its columns is added up."""
        ways = [way for _, _, _, way in cut_modules(self._plan, place, layer)]
        if isinstance(layer, Jointed) or not ways or VOCABULARY in ways:
            return
        by_rows = ways.count(ROW)
        if by_rows in (0, len(ways)):
            is_cut, lacks = ("columns", ROW) if not by_rows else ("rows", COLUMN)
            raise ConfigError(
                f"tensor: layer {place}, a {type(layer).__name__}, has matrices that are cut by "
                f"{is_cut}, and none by {lacks!r}; expected columns whose outputs go on to rows, "
                "or an axrt.InPieces, which says what travels"
            )
        check_can_pause()

    def vocabulary(self, last: int, is_loss: bool) -> None:
        """Check that what makes a part of the logits does so for the loss.

        Args:
            last: index of the last layer.
            is_loss: it is the loss, which has weights or buffers.
        """
        if not self._vocabulary:
            return
        if is_loss:
            raise ConfigError(
                f"tensor: {self._vocabulary[0]} is cut by 'vocabulary', and the loss has weights "
                "or buffers; expected a loss without, such as axrt.cross_entropy"
            )
        if self._plan.get(LOSS) == TOKEN or any(
            path.partition(".")[0] != str(last) for path in self._vocabulary
        ):
            raise ConfigError(
                f"tensor: {self._vocabulary[0]} is cut by 'vocabulary'; expected one linear module "
                "of the last layer, whose result is the logits, and axrt.cross_entropy as the "
                "loss, which is not named"
            )

    def _one_pattern(self, name: str, pattern: str) -> None:
        """Note the pattern that names a module or an attribute; a second one is refused."""
        if name in self._cut_by:
            raise ConfigError(
                f"tensor: both {self._cut_by[name]!r} and {pattern!r} name {name}; expected one"
            )
        self._cut_by[name] = pattern
        self._matched.add(pattern)

    def _batch_norm(self, place: int, layer: nn.Module) -> None:
        """Check that no statistics over tokens are those of a member's own."""
        by_tokens = any(
            way == TOKEN and fnmatchcase(str(place), pattern) for pattern, way in self._plan.items()
        )
        for path, module in layer.named_modules(prefix=str(place)):
            if isinstance(module, _BatchNorm) and (by_tokens or isinstance(layer, Jointed)):
                raise ConfigError(
                    f"tensor: {path} is a {type(module).__name__}, whose statistics are those of "
                    "all tokens, and a member would have its own; expected it in a layer that sees "
                    "all tokens, which is not named and does not come in pieces"
                )

    def all_matched(self, layers: int) -> None:
        """Check that each pattern has matched something."""
        places = [str(place) for place in range(layers)]
        for pattern, way in self._plan.items():
            if way == TOKEN:
                fits, what = [LOSS, *places], "the index of a layer, or 'loss'"
                matches = pattern == LOSS or any(fnmatchcase(name, pattern) for name in places)
            else:
                fits, what = sorted(self._names), "the name of a module"
                what += " and of an attribute" * (way == DIVIDE)
                matches = pattern in self._matched
            if not matches:
                near = get_close_matches(pattern, fits, n=1, cutoff=0.3)
                hint = f"; the nearest is {near[0]!r}" if near else ""
                raise ConfigError(f"tensor: {pattern!r} matches nothing; expected {what}{hint}")

    def _cut(self, path: str, module: nn.Module, way: str) -> None:
        size = self._size
        is_looked_up = way == VOCABULARY and type(module) is nn.Embedding and path.isdigit()
        if type(module) is not nn.Linear and not is_looked_up:
            raise ConfigError(
                f"tensor: {path} is a {type(module).__name__}; expected an nn.Linear to cut by "
                f"{way}{', or an nn.Embedding that is a layer' * (way == VOCABULARY)}"
            )
        _check_plain(path, module)
        whole, of = _width_of(module, way)
        widths = (whole,) if way == ROW else blocks_of(way, whole)
        if sum(widths) != whole:
            raise ConfigError(
                f"tensor: {path} has {whole} {of}, and {way!r} has blocks of "
                f"{', '.join(map(str, widths))}; expected blocks that come to {whole}"
            )
        if uneven := [width for width in widths if width % size]:
            raise ConfigError(
                f"tensor: {path} has {uneven[0]} {of}{' in a block' * (len(widths) > 1)}, and "
                f"{self._key} = {size}; expected a width that {size} divides"
            )

    def _divided(self, name: str, value: Any) -> None:
        numbers = value if isinstance(value, tuple) else (value,)
        if not all(type(one) is int and one > 0 and one % self._size == 0 for one in numbers):
            raise ConfigError(
                f"tensor: {name} is {value!r}, and {self._key} = {self._size}; expected a "
                f"number, or a tuple of numbers, that {self._size} divides"
            )

    def _shared(self, place: int, layer: nn.Module) -> None:
        """Check that no parameter that is cut has a second name."""
        names: dict[int, list[str]] = {}
        for name, parameter in layer.named_parameters(prefix=str(place), remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        for of_one in names.values():
            is_cut = any(name.rpartition(".")[0] in self._cut_by for name in of_one)
            if len(of_one) > 1 and is_cut:
                raise ConfigError(
                    f"tensor: {of_one[0]} and {of_one[1]} are one parameter, and it is cut; "
                    "expected a parameter of its own"
                )


def _width_of(module: nn.Module, way: str) -> tuple[int, str]:
    """What is shared out of a module, and what it is called."""
    if isinstance(module, nn.Embedding):
        return module.num_embeddings, "rows"
    assert isinstance(module, nn.Linear)
    return (module.in_features, "inputs") if way == ROW else (module.out_features, "outputs")


def _check_plain(path: str, module: nn.Module) -> None:
    """Check that nothing but its forward knows a module's weights, and that it has no options."""
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    of_weights = [
        getattr(one, name, None)
        for one in module.parameters()
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks")
    ]
    names = {name for name, _ in module.named_parameters()}
    if any(hooks) or any(of_weights) or list(module.children()) or names - {"weight", "bias"}:
        raise ConfigError(
            f"tensor: {path} has hooks, weights or modules of its own, and it is cut; expected a "
            f"plain nn.{type(module).__name__}"
        )
    options = ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse")
    found = {name: getattr(module, name, None) for name in options}
    if some := [name for name, one in found.items() if one is not None and one is not False]:
        raise ConfigError(
            f"tensor: {path} is an nn.Embedding with {', '.join(some)}, and it is cut; expected "
            "one without"
        )


def _check_layer(place: int, path: str, module: nn.Module, layer: Layer) -> None:
    """Check that a layer of which something is cut may be."""
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
    if any(isinstance(one, Jointed) for one in module.modules() if one is not module):
        raise ConfigError(
            f"tensor: {path} is in layer {place}, which has a layer in pieces within it, whose "
            "joints nobody would see; expected its pieces in those of the layer"
        )
