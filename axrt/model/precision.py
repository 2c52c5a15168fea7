"""The types of a run (mixed precision): which tensors of layers are narrow, and what passes between
layers and their kept modules."""

# Narrow layers compute in bfloat16 or float16 on parameters and buffers of that type. Trained
# parameters have float32 masters in their buckets. Everything else that is made narrow, frozen
# parameters and buffers, keeps its float32 *original* on the host: checkpoints have originals, and
# modules of the user's get them back. Modules of classes that are to be kept are float32: hooks
# widen what they are given, and narrow what they return.
#
# A stage rounds what enters a layer and widens what enters the loss; hooks on kept modules do both
# within a layer. Frozen parameters and buffers keep a float32 original on the host.

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from axrt.config import Precision
from axrt.errors import ConfigError
from axrt.transport.payload import flatten, unflatten

_TYPES = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
Place = tuple[int, int, tuple[int, ...]]  # memory, where it begins there, and shape
_NARROWED = (torch.float32, torch.bfloat16, torch.float16)


class Types(NamedTuple):
    """The types that layers compute in."""

    compute: torch.dtype | None = None  # type of products by autocast; None: no autocast
    # narrow type of parameters, buffers and activations; None: they are as they are
    weights: torch.dtype | None = None
    # names of classes of modules that stay as they are where weights are narrow
    keep: tuple[str, ...] = ()

    @property
    def between(self) -> torch.dtype | None:
        """The type in which layers hand float32 values on; None: as they are."""
        return self.weights or self.compute


AS_THEY_ARE = Types()


def types_of(precision: Precision) -> Types:
    """The types that settings ask for."""
    return Types(_TYPES[precision.compute], _TYPES[precision.weights], precision.keep)


def in_type(value: Any, to: torch.dtype, of: torch.dtype = torch.float32) -> Any:
    """A payload whose tensors of one type have another one. Outputs of a model that cannot travel,
    such as those of `transformers`, are looked into where torch knows how they are put together."""
    if isinstance(value, Tensor):  # most often
        return value.to(to) if value.dtype == of else value
    try:
        skeleton, tensors = flatten(value)
    except TypeError:
        return tree_map_only(Tensor, lambda one: one.to(to) if one.dtype == of else one, value)
    return unflatten(
        skeleton, [tensor.to(to) if tensor.dtype == of else tensor for tensor in tensors]
    )


def is_kept(module: nn.Module, keep: Sequence[str]) -> bool:
    """The module is of a class, or of a subclass of one, that is to be kept."""
    return any(kind.__name__ in keep for kind in type(module).__mro__)


@dataclass(slots=True)
class _Pair:
    """A frozen parameter or a buffer that is narrow, and its original on the host."""

    # dict of a module that has the narrow tensor; a layer may put another one there
    holder: dict[str, Any]
    name: str  # key of the tensor in it
    narrow: Tensor  # tensor that was there last
    original: Tensor  # its values in float32
    before: torch.dtype  # type that the module is given back

    def catch_up(self) -> None:
        """Take what a layer has written, such as a running mean, or put in the tensor's place.

        Values are compared, since a kernel may write without counting up the version, as that of
        batch norms does. Where they are those of the original, it is not rounded.
        """
        now = self.holder[self.name]
        if now is None:
            return
        self.narrow = now
        if now.shape != self.original.shape:
            self.original = _on_host(now)
        elif not torch.equal(now.detach().cpu(), self.original.to(now.dtype)):
            self.original.copy_(now.detach())

    @torch.no_grad()
    def publish(self) -> None:
        """Give the layer what was written to the original since it has caught up."""
        self.narrow.copy_(self.original)

    def give_back(self) -> None:
        """Give the module a tensor of the type that it had."""
        self.catch_up()
        self.narrow.data = self.original.to(self.narrow.device, self.before)


class NarrowLayers:
    """The layers of a rank in a narrow type.

    Args:
        types: types of the run; `types.weights` is a narrow one.
    Attributes:
        classes: names of the classes of all modules, those that they are derived from included.
    """

    def __init__(self, types: Types) -> None:
        assert types.weights is not None
        self._to, self._keep = types.weights, types.keep
        self._pairs: list[_Pair] = []
        self._known: set[int] = set()  # tensors that were seen, by identity
        self._trained: set[int] = set()
        self._widened: list[tuple[Tensor, torch.dtype]] = []  # of kept modules, given narrow
        self._handles: list[RemovableHandle] = []
        self.classes: set[str] = set()

    def add(self, layer: nn.Module) -> None:
        """Make a layer narrow, in place. Trained parameters are only noted: their bucket makes them
        narrow (`type_of`).

        Raises:
            ConfigError: a module that is kept shares a parameter with one that is not.
        """
        for module in layer.modules():
            self.classes.update(kind.__name__ for kind in type(module).__mro__)
        modules = dict.fromkeys(_walk(layer, self._keep))
        kept = [module for module in modules if is_kept(module, self._keep)]
        residency = {id(tensor) for module in kept for tensor in _tensors(module)}
        for module in kept:
            self._stay(module)
        for module in modules:
            if is_kept(module, self._keep):
                continue
            for holder in (module._parameters, module._buffers):
                for name, tensor in holder.items():
                    if id(tensor) in residency:
                        raise ConfigError(
                            f"precision.keep = {list(self._keep)}: {name} of a "
                            f"{type(module).__name__} is also that of a module that is kept; "
                            "expected both kept, or neither"
                        )
                    self._narrow(holder, name)

    def type_of(self, parameter: nn.Parameter) -> torch.dtype | None:
        """The type that a trained parameter is to have; None where it stays as it is."""
        return self._to if id(parameter) in self._trained else None

    def originals(self) -> dict[Place, Tensor]:
        """The originals with their present values, by the place of their narrow tensors.

        What is written to them counts when it is published.
        """
        for pair in self._pairs:
            pair.catch_up()
        return {place_of(pair.narrow): pair.original for pair in self._pairs}

    def publish(self) -> None:
        """Give layers what was written to originals since `originals`."""
        for pair in self._pairs:
            pair.publish()

    def release(self) -> None:
        """Give the modules their own types back."""
        for handle in self._handles:
            handle.remove()
        for pair in self._pairs:
            pair.give_back()
        for tensor, before in self._widened:
            tensor.data = tensor.data.to(before)
        self._pairs.clear()

    def _narrow(self, holder: dict[str, Any], name: str) -> None:
        tensor = holder[name]
        if tensor is None or id(tensor) in self._known or not _may_be_narrow(tensor):
            return
        self._known.add(id(tensor))
        if tensor.requires_grad:
            self._trained.add(id(tensor))
            return
        original, before = _on_host(tensor), tensor.dtype
        tensor.data = tensor.data.to(self._to)
        self._pairs.append(_Pair(holder, name, tensor, original, before))

    def _stay(self, module: nn.Module) -> None:
        """Let a module, and all within it, be float32, and take and give narrow values."""
        for tensor in _tensors(module):
            if _may_be_narrow(tensor) and tensor.dtype != torch.float32:
                self._widened.append((tensor, tensor.dtype))
                tensor.data = tensor.data.float()
        narrow = self._to

        def widen(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
            wide = {key: in_type(value, torch.float32, narrow) for key, value in kwargs.items()}
            return tuple([in_type(value, torch.float32, narrow) for value in args]), wide

        def narrowed(module: nn.Module, args: Any, output: Any) -> Any:
            return in_type(output, narrow)

        self._handles += [
            module.register_forward_pre_hook(widen, with_kwargs=True),
            module.register_forward_hook(narrowed),
        ]


def types_on_device(layer: nn.Module, types: Types) -> dict[int, torch.dtype]:
    """The types that tensors of a layer get on the device, by identity; tensors that stay as they
    are are left out.

    Modules that are kept get float32. All else gets the narrow type: frozen tensors from
    `NarrowLayers.add`, trained ones from their bucket.
    """
    found: dict[int, torch.dtype] = {}
    for module in _walk(layer, types.keep) if types.weights else ():
        kept = is_kept(module, types.keep)
        own = (*module._parameters.values(), *module._buffers.values())
        for tensor in _tensors(module) if kept else own:
            if tensor is not None and _may_be_narrow(tensor):
                assert types.weights is not None
                found[id(tensor)] = torch.float32 if kept else types.weights
    return found


def place_of(tensor: Tensor) -> Place:
    """Where a tensor is: its memory, also where that is let go for a time, and its shape, which it
    shares with what was detached from it."""
    memory = int(tensor.untyped_storage()._cdata)
    return memory, int(tensor.storage_offset()), tuple(tensor.shape)


def make_narrow(layer: nn.Module, types: Types) -> None:
    """Make a layer narrow that is not to be trained, trained parameters included; nothing is kept
    of what it was."""
    if types.weights is None:
        return
    layers = NarrowLayers(types)
    layers.add(layer)
    for parameter in layer.parameters():
        if to := layers.type_of(parameter):
            parameter.data = parameter.data.to(to)


def _walk(module: nn.Module, keep: Sequence[str]) -> Iterator[nn.Module]:
    """A module and all within it, but for what is within kept ones."""
    yield module
    for child in module.children() if not is_kept(module, keep) else ():
        yield from _walk(child, keep)


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _may_be_narrow(tensor: Tensor) -> bool:
    data = tensor.data
    return type(data) is Tensor and data.layout is torch.strided and data.dtype in _NARROWED


def _on_host(tensor: Tensor) -> Tensor:
    """A copy of its own on the CPU, float32 where the tensor is narrower."""
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return tensor.detach().to("cpu", wide, copy=True)
