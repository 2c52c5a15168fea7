"""Which parameters of a model are matrices that an optimizer steps as a whole, and of which blocks
they are fused."""

# By itself: what has two dimensions between the first and the last layer, which are the embedding
# and the head, but for tables of further embeddings. A matrix whose outputs are several, such as
# queries, keys and values, is one matrix for each of them; the model has said so where members of a
# team cut it ("column:3"), or a pattern does ("*.qkv.weight:3").

from collections import Counter
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import Tensor, nn

from axrt.errors import ConfigError

from .layers import Layer, LayerSpec, TiedLayerSpec, without_memory
from .module import PipelineModule
from .tensor_plan import COLUMN, blocks_of, cuts_in


class Matrices:
    """The matrices of a model.

    Args:
        patterns: patterns of names, each with the number of matrices behind a colon where it names
            fused ones, or with the rows of each; (): those between the first and the last layer.
    """

    def __init__(self, model: PipelineModule, patterns: Sequence[str] = ()) -> None:
        self._plan, self._last = model.tensor, len(model.layers) - 1
        self._patterns = dict(_with_blocks(pattern) for pattern in patterns)
        self._looked_up = {
            name for place, layer in enumerate(model.layers) for name in _looked_up_in(layer, place)
        }
        names = [name for name, parameter in _trained(model) if self.blocks_of(name, parameter)]
        self._places = {name: place for place, name in enumerate(names)}

    def blocks_of(self, name: str, parameter: Tensor) -> tuple[int, ...]:
        """The rows of each matrix that a parameter is fused of; () where it is none.

        Args:
            name: its name in the model.
        Raises:
            ConfigError: a pattern names it, and it has not two dimensions.
        """
        return self.fused_of(name, parameter) if self._has(name, parameter) else ()

    def fused_of(self, name: str, parameter: Tensor) -> tuple[int, ...]:
        """The rows of each matrix that a matrix is fused of, whether it is one of these or not."""
        rows, path = len(parameter), name.rpartition(".")[0]
        said = self._patterns.get(self._pattern_of(name) or "", "")
        ways = [f"{COLUMN}:{said}"] if said else [way for _, way in cuts_in(self._plan, path)]
        for way in ways:
            blocks = blocks_of(way, rows) if way.partition(":")[0] == COLUMN else (rows,)
            if sum(blocks) == rows:
                return blocks
        return (rows,)

    def place_of(self, name: str) -> int:
        """The index of a matrix among those of the model; 0 where it is none."""
        return self._places.get(name, 0)

    def _has(self, name: str, parameter: Tensor) -> bool:
        if not self._patterns:
            is_between = 0 < int(name.partition(".")[0]) < self._last
            return is_between and parameter.dim() == 2 and name not in self._looked_up
        pattern = self._pattern_of(name)
        if pattern is not None and parameter.dim() != 2:
            raise ConfigError(
                f"optimizer.matrices: {pattern!r} names {name}, which has "
                f"{parameter.dim()} dimensions; expected names of matrices"
            )
        return pattern is not None

    def _pattern_of(self, name: str) -> str | None:
        return next((one for one in self._patterns if fnmatchcase(name, one)), None)

    def check(self, model: PipelineModule) -> None:
        """Check that each pattern names a trained matrix, and that there is one without patterns.

        Raises:
            ConfigError: one names none, or its blocks do not fit.
        """
        for name, parameter in _trained(model):
            said = self._patterns.get(self._pattern_of(name) or "", "")
            if said and sum(blocks_of(f"{COLUMN}:{said}", len(parameter))) != len(parameter):
                raise ConfigError(
                    f"optimizer.matrices: {self._pattern_of(name)}:{said} names {name}, which has "
                    f"{len(parameter)} rows; expected a divisor of them, or numbers that add up"
                )
        names = list(self._places)
        all_names = [name for name, parameter in _trained(model) if parameter.dim() == 2]
        first = {self._pattern_of(name) for name in names}
        for pattern in self._patterns:
            matches = any(fnmatchcase(name, pattern) for name in names)
            if matches and pattern not in first:
                raise ConfigError(
                    f"optimizer.matrices: patterns before {pattern!r} take all that it names; "
                    "expected it before them"
                )
            if not matches:
                tail = pattern.lstrip("*?.")
                parts = tail.count(".") + 1
                tails = dict.fromkeys(".".join(name.split(".")[-parts:]) for name in all_names)
                near = get_close_matches(tail, tails, n=1, cutoff=0.3)
                hint = f"; the nearest is '*.{near[0]}'" if near else ""
                raise ConfigError(
                    f"optimizer.matrices: {pattern!r} matches nothing; expected the name of a "
                    f"matrix, such as '*.up.weight'{hint}"
                )
        if not names:
            raise ConfigError(
                "the optimizer steps matrices, and the model has none between its first and last "
                "layer; expected optimizer.matrices with names of some, or another optimizer"
            )

    def check_linear(self, model: PipelineModule, method: str) -> None:
        """Check that each matrix is the weight of one `torch.nn.Linear`.

        Args:
            method: name of the optimizer, for the error.
        Raises:
            ConfigError: one is not.
        """
        modules = [
            (place, layer, without_memory(layer) if isinstance(layer, LayerSpec) else layer)
            for place, layer in enumerate(model.layers)
        ]
        every = [
            (f"{place}.{path}.weight" if path else f"{place}.weight", one)
            for place, _, module in modules
            if isinstance(module, nn.Module)
            for path, one in module.named_modules(remove_duplicate=False)
        ]
        held = Counter(id(one) for _, of in every for one in of._parameters.values())
        linear = {name: held[id(one.weight)] == 1 for name, one in every if type(one) is nn.Linear}
        tied = {
            f"{place}.{name}"
            for place, layer, _ in modules
            if isinstance(layer, TiedLayerSpec)
            for name in layer.tied
        }
        for name in self._places:
            if name in tied or not linear.get(name, True):
                is_what = "held by several layers or modules"
            elif name not in linear:
                is_what = "no weight of a Linear"
            else:
                continue
            raise ConfigError(
                f"optimizer.name = {method!r} and {name} is {is_what}, of which it knows no "
                "factors; expected weights of torch.nn.Linear that one module has, and "
                "optimizer.matrices without this one"
            )


def _with_blocks(pattern: str) -> tuple[str, str]:
    """A pattern of names, and what it says of blocks; "" where it says nothing."""
    name, colon, said = pattern.partition(":")
    if colon and not all(number.isdigit() and int(number) for number in said.split(",")):
        raise ConfigError(
            f"optimizer.matrices: {pattern!r} has {said!r} behind its colon; expected how many "
            "matrices are fused, such as '*.qkv.weight:3', or the rows of each, such as ':64,16,16'"
        )
    return name, said


def _trained(model: PipelineModule) -> Iterator[tuple[str, nn.Parameter]]:
    for place, layer in enumerate(model.layers):
        yield from trained_in(layer, place)


def _looked_up_in(layer: Layer, place: int) -> Iterator[str]:
    """The names in the model of a layer's tables of embeddings."""
    module = without_memory(layer) if isinstance(layer, LayerSpec) else layer
    if isinstance(module, nn.Module):
        yield from (f"{place}.{name}" for name in getattr(module, "axrt_looked_up", ()))
        for path, one in module.named_modules(prefix=str(place)):
            if isinstance(one, nn.Embedding | nn.EmbeddingBag):
                yield f"{path}.weight"


def trained_in(layer: Layer, place: int) -> Iterator[tuple[str, nn.Parameter]]:
    """The trained parameters of a layer by their names in the model; of one that is not built yet
    without memory."""
    module = without_memory(layer) if isinstance(layer, LayerSpec) else layer
    if isinstance(module, nn.Module):
        for name, parameter in module.named_parameters(prefix=str(place)):
            if parameter.requires_grad:
                yield name, parameter
