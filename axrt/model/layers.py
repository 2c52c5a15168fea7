"""Layers: modules, specifications of modules that are built where they are needed, and plain
functions."""

import copy
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from axrt.errors import ConfigError

from .seeds import initial_seed_of


class LayerSpec:
    """A layer that is not built yet; only the ranks that hold it build it.

    Args:
        typename: class of the module.
        *args, **kwargs: arguments that the class is called with. Its weights depend on the seed and
            the layer's index in the model alone.

    The `PipelineModule` refuses a spec that cannot be built, since it knows which layer that is.
    """

    def __init__(self, typename: type[nn.Module], *args: Any, **kwargs: Any) -> None:
        self.typename = typename
        self.args = args
        self.kwargs = kwargs

    def build(self) -> nn.Module:
        """The module, with weights that torch's generator gives now."""
        return self.typename(*self.args, **self.kwargs)

    @cached_property
    def looked_at(self) -> nn.Module:
        """The module without memory, to be looked at and not to be changed. Layers that are one
        specification share it, so it does not tell which weights are the same ones."""
        return without_memory(self)

    def __repr__(self) -> str:
        words = [repr(arg) for arg in self.args] + [
            f"{key}={value!r}" for key, value in self.kwargs.items()
        ]
        name = getattr(self.typename, "__name__", str(self.typename))
        return f"LayerSpec({', '.join([name, *words])})"


class Function(nn.Module):
    """A plain function as a layer."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, value: Any) -> Any:
        return self.function(value)

    def extra_repr(self) -> str:
        return getattr(self.function, "__qualname__", repr(self.function))


class TiedLayerSpec(LayerSpec):
    """A layer that shares a weight with every other layer of the same key, wherever each of them is
    held.

    Args:
        key: name of the shared weight.
        typename, *args, **kwargs: as for `LayerSpec`; or a module and nothing else, whose values
            the layer begins with. It is copied, so it does not get trained weights, and must be the
            same on every rank: seed torch before you make it, or load its values.
        forward_fn: function that runs as `forward_fn(module, value)` in place of `module(value)`,
            and may call that: the module that it is given runs the class's own forward. Hooks of
            the layer run once, around all of it. None: the module runs by itself.
        tied_weight_attr: name of the shared parameter, or a list of names; dots lead to parameters
            of submodules. The first layer of the key gives its initial value, and says whether it
            is trained.

    Each layer keeps a copy and an accumulator of its own; their gradients are summed in the order
    of layers, and every copy is stepped alike.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module] | nn.Module,
        *args: Any,
        forward_fn: Callable[[Any, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = "weight",
        **kwargs: Any,
    ) -> None:
        self.given = typename if isinstance(typename, nn.Module) else None
        kind = type(typename) if isinstance(typename, nn.Module) else typename
        super().__init__(kind, *args, **kwargs)
        self.key = key
        self.forward_fn = forward_fn
        self.tied = (
            (tied_weight_attr,) if isinstance(tied_weight_attr, str) else tuple(tied_weight_attr)
        )

    def build(self) -> nn.Module:
        module = super().build() if self.given is None else copy.deepcopy(self.given)
        return module if self.forward_fn is None else _running(module, self.forward_fn)


def _running(module: nn.Module, forward_fn: Callable[[Any, Any], Any]) -> nn.Module:
    """Give the module another forward, by a class of its own, so that its parameters keep their
    names.

    The function is given the same module once more, an object that shares everything with it but
    the class: called, it runs the forward that the class had, without hooks, which are under way
    already. Made anew each time: a copy of the layer is another module.
    """
    kind = type(module)
    inner = type(kind.__name__, (kind,), {"__call__": kind.forward, "__module__": kind.__module__})

    def forward(self: nn.Module, value: Any) -> Any:
        within: Any = object.__new__(inner)
        object.__setattr__(within, "__dict__", self.__dict__)
        return forward_fn(within, value)

    module.__class__ = type(
        kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__}
    )
    return module


Layer = nn.Module | LayerSpec | Callable[[Any], Any]


def refusal_of(layer: Any) -> str:
    """The end of an error's text that says why this is no layer; "" where it is one."""
    if not isinstance(layer, LayerSpec):
        if isinstance(layer, nn.Module) and (lazy := lazy_in(layer)):
            return f": {lazy}"
        is_one = callable(layer) and not isinstance(layer, type)
        return "" if is_one else "; expected a module, a LayerSpec or a function"
    if isinstance(layer.typename, type) and issubclass(layer.typename, LazyModuleMixin):
        return f": {_LAZY}"
    if isinstance(layer, TiedLayerSpec) and layer.given is not None:
        return "; expected a module alone, or a class with what it takes" * bool(
            layer.args or layer.kwargs
        )
    if not (isinstance(layer.typename, type) and issubclass(layer.typename, nn.Module)):
        return "; expected a subclass of torch.nn.Module first: plain functions need no LayerSpec"
    try:
        takes = inspect.signature(layer.typename)
    except (TypeError, ValueError):  # says nothing of itself
        return ""
    try:
        takes.bind(*layer.args, **layer.kwargs)
    except TypeError as error:
        return f": {error}; expected what {layer.typename.__name__} takes, {takes}"
    return ""


_LAZY = (
    "its shape is known after the first microbatch, and layers are cut before; expected a class "
    "with all sizes, such as Linear in place of LazyLinear"
)


def lazy_in(module: nn.Module) -> str:
    """Why a module cannot be a layer or a loss yet, where it has weights without a shape; ""
    else."""
    every = (*module.named_parameters(), *module.named_buffers())
    lazy = [name for name, tensor in every if is_lazy(tensor)]
    return f"{_LAZY} ({lazy[0]} has none yet)" if lazy else ""


def told(layer: Any) -> str:
    """A layer as a line of an error shows it: of modules with many lines the class alone."""
    shown = repr(layer)
    return type(layer).__name__ if "\n" in shown else shown


def name_of(layer: Layer) -> str:
    """The class name of a layer, or the name of a function."""
    if isinstance(layer, LayerSpec):
        return layer.typename.__name__
    return (
        type(layer).__name__
        if isinstance(layer, nn.Module)
        else getattr(layer, "__name__", type(layer).__name__)
    )


def build(layers: Sequence[Layer], index: int, seed: int) -> nn.Module:
    """Layer `index` of the model as a module; torch's generator is afterwards where it was.

    A `LayerSpec` is built under the seed of (seed, index); a tied weight takes its value from the
    first layer of its key. A module is taken as it is, and not copied.

    Args:
        layers: layers of the whole model.
        index: index of the layer in the model.
        seed: run seed, 0 <= seed < 2**63.
    Raises:
        ConfigError: tied layers do not fit each other.
    """
    layer = layers[index]
    if not isinstance(layer, LayerSpec):
        return layer if isinstance(layer, nn.Module) else Function(layer)
    module = _built(layer, index, seed)
    if lazy := lazy_in(module):
        raise ConfigError(f"layer {index} is {told(layer)}: {lazy}")
    if isinstance(layer, TiedLayerSpec) and (first := places_of(layers, layer.key)[0]) < index:
        share(layers, first, _built(tied_layer(layers, first), first, seed), index, module)
    return module


def places_of(layers: Sequence[Layer], key: str) -> list[int]:
    """The indices of the layers that share the weight of a key."""
    return [
        place
        for place, layer in enumerate(layers)
        if isinstance(layer, TiedLayerSpec) and layer.key == key
    ]


def tied_layer(layers: Sequence[Layer], place: int) -> TiedLayerSpec:
    """The tied layer at that index."""
    layer = layers[place]
    assert isinstance(layer, TiedLayerSpec)
    return layer


def share(
    layers: Sequence[Layer], place: int, module: nn.Module, other_place: int, other: nn.Module
) -> None:
    """Give layer `other_place` the tied parameters of layer `place`.

    Args:
        layers: layers of the whole model.
        place: index of the layer that gives its parameters.
        module: module that was built for layer `place`.
        other_place: index of the layer that takes them.
        other: module that was built for layer `other_place`.
    Raises:
        ConfigError: one of them has no such parameter, or one of another shape.
    """
    names, other_names = tied_layer(layers, place).tied, tied_layer(layers, other_place).tied
    both = f"layers {place} and {other_place} are tied by key {tied_layer(layers, place).key!r}"
    if len(names) != len(other_names):
        raise ConfigError(
            f"{both}, but tied_weight_attr names {list(names)} and {list(other_names)}; expected "
            "as many names"
        )
    for name, other_name in zip(names, other_names, strict=True):
        parameter, replaced = (
            _parameter(place, module, name),
            _parameter(other_place, other, other_name),
        )
        if replaced.shape != parameter.shape:
            raise ConfigError(
                f"{both}, but {name} of the one has shape {tuple(parameter.shape)} and "
                f"{other_name} of the other "
                f"{tuple(replaced.shape)}; expected the same"
            )
        parent, _, attribute = other_name.rpartition(".")
        setattr(other.get_submodule(parent), attribute, parameter)


def _parameter(place: int, module: nn.Module, name: str) -> nn.Parameter:
    try:
        return module.get_parameter(name)
    except AttributeError:
        known = ", ".join(name for name, _ in module.named_parameters())
        raise ConfigError(
            f"layer {place}: tied_weight_attr = {name!r} is no parameter of "
            f"{type(module).__name__}; expected one of {known}"
        ) from None


def _built(layer: LayerSpec, index: int, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):  # built on the CPU, wherever it runs
        torch.default_generator.manual_seed(initial_seed_of(seed, index))
        try:
            return layer.build()
        except Exception as error:
            error.add_note(f"while layer {index} of the model was built, {layer!r}")
            raise


class _NothingDrawn(TorchFunctionMode):
    """Context in which tensors of the meta device are not filled with normal numbers.

    There is nothing to fill, and torch imports torch._dynamo for it, which takes as long as torch
    itself. `nn.Embedding` draws such numbers, and so do most models.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if func in (Tensor.normal_, nn.init.normal_):
            filled: Tensor = args[0] if args else given["tensor"]
            if filled.is_meta:
                return filled
        return func(*args, **given)


def without_memory(layer: LayerSpec) -> nn.Module:
    """The module of a specification on torch's meta device, which allocates nothing; on the CPU
    where its constructor looks at values. Torch's generator is afterwards where it was."""
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"), _NothingDrawn():
                return layer.build().to("meta")  # one that is given has memory
        except (RuntimeError, NotImplementedError):
            return layer.build()


def specification(layer: LayerSpec) -> tuple[object, ...]:
    """A key that is equal for layers that are built alike."""
    return (
        layer.typename,
        repr(layer.args),
        repr(layer.kwargs),
        getattr(layer, "forward_fn", None),
        getattr(layer, "given", None),
    )


def _to_count(layer: Layer) -> Layer:
    """A module with the layer's parameters, which may have no memory; a function as it is."""
    if isinstance(layer, TiedLayerSpec) and layer.given is not None:
        return layer.given
    return layer.looked_at if isinstance(layer, LayerSpec) else layer


def num_parameters(layer: Layer) -> int:
    """Number of elements of a layer's parameters; 0 for a plain function.

    They are counted without allocating them where the layer's constructor allows that.
    """
    layer = _to_count(layer)
    return sum(p.numel() for p in layer.parameters()) if isinstance(layer, nn.Module) else 0


def num_multiplied(layer: Layer) -> int:
    """Number of elements of the parameters that a forward multiplies with: all but those of
    embeddings, of which it looks up a few rows. The operations of a layer that was traced, which
    is one of a model of such layers."""
    layer = _to_count(layer)
    if isinstance(operations := getattr(layer, "axrt_operations", None), int):
        return operations
    modules = layer.modules() if isinstance(layer, nn.Module) else ()
    looked_up = [one for one in modules if isinstance(one, (nn.Embedding, nn.EmbeddingBag))]
    return num_parameters(layer) - sum(one.weight.numel() for one in looked_up)


def counted(layers: Sequence[Layer], count: Callable[[Layer], float]) -> list[float]:
    """What a function counts in each layer. Layers of one class with the same arguments, the very
    objects, are counted once, since each has to be built for that."""
    known: dict[tuple[object, ...], float] = {}
    found = []
    for layer in layers:
        key: tuple[object, ...] = (id(layer),)
        if type(layer) is LayerSpec:  # another class may build something else of the same
            given = (*layer.args, *itertools.chain(*sorted(layer.kwargs.items())))
            key = (layer.typename, *map(id, given))
        if key not in known:
            known[key] = count(layer)
        found.append(known[key])
    return found
