"""Stages on fake tensors, which have shapes and types and no memory: what a stage would do of a
microbatch, and what its graph would keep."""

import copy
import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from axrt.device.device import CPU
from axrt.model.precision import NarrowLayers, Types, types_on_device
from axrt.model.seeds import BorrowedGenerator
from axrt.model.stage import Stage
from axrt.transport.payload import flatten, unflatten

from .parameters import num_bytes
from .skeleton import Skeletons, like


class Sketch(Stage):
    """A stage on fake tensors, which have no addresses."""

    def _to_send(self, tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_(tensor.requires_grad)


class Sketches:
    """Makes the layers of stages on fake tensors.

    It builds all skeletons, and is not to be made within a mode, where all tensors seem to be fake.
    """

    def __init__(self, skeletons: Skeletons, types: Types) -> None:
        self._skeletons, self._types = skeletons, types
        # the types that tensors of skeletons get, by identity
        self._to: dict[int, torch.dtype] = {}
        for place in range(len(skeletons.layers)):
            self._to.update(types_on_device(skeletons.layer(place), types))

    def layers(self, places: Iterable[int]) -> list[nn.Module]:
        """Copies of skeletons whose tensors are fake, in the types that they have on a device;
        within `fake_tensors`."""
        layers, memo = [], dict[int, Any]()
        for place in places:
            skeleton = self._skeletons.layer(place)
            if len(self._skeletons.key_of(place)) > 1:
                memo = {}  # built layers share a skeleton, and no tensors
            for tensor in _all_tensors(skeleton):
                memo.setdefault(id(tensor), like(tensor, CPU, self._to.get(id(tensor))))
            layers.append(copy.deepcopy(skeleton, memo))
        if self._types.weights:
            narrow = NarrowLayers(self._types)
            for layer in layers:
                narrow.add(layer)  # for its hooks: fake tensors it leaves as they are
        return layers


@contextmanager
def fake_tensors(seed: int) -> Iterator[BorrowedGenerator]:
    """Context in which all that is made has no memory.

    Args:
        seed: run seed, for the generator that it gives.
    """
    from torch._subclasses import FakeTensorMode  # which takes its time

    generator = BorrowedGenerator(seed, CPU)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with warnings.catch_warnings(), generator.borrowed(), mode:
        warnings.simplefilter("ignore")  # of fake tensors
        yield generator


def fake(payload: Any) -> Any:
    """The payload with fake tensors, within `fake_tensors`."""
    skeleton, tensors = flatten(payload)
    return unflatten(skeleton, [like(tensor, CPU) for tensor in tensors])


class _Saved:
    """A tensor that a graph has saved; it lives as long as the graph."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@contextmanager
def saved_by_graphs() -> Iterator[Any]:
    """Context that gives a function, which lists the tensors that living graphs have saved."""
    living: weakref.WeakSet[_Saved] = weakref.WeakSet()

    def pack(tensor: Tensor) -> _Saved:
        one = _Saved(tensor.detach())  # an output that knows its graph would keep it for ever
        living.add(one)
        return one

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one.tensor):
        yield lambda: [one.tensor for one in living]


def bytes_apart(tensors: Iterable[Tensor], weights: Iterable[Tensor]) -> int:
    """The size of the memory that tensors are in, without that of weights."""
    own = {tensor.untyped_storage()._cdata for tensor in weights}
    dense = [tensor for tensor in tensors if tensor.layout is torch.strided]
    return num_bytes([one for one in dense if one.untyped_storage()._cdata not in own])


def _all_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Parameters, buffers, and tensors that are plain attributes."""
    yield from module.parameters()
    yield from module.buffers()
    for one in module.modules():
        yield from (value for value in vars(one).values() if isinstance(value, Tensor))
