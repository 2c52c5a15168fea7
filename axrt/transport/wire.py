"""How a payload lies on the wire.

Its skeleton and one *spec* a tensor (dtype, shape, strides, requires_grad) are small and repeat from microbatch to
microbatch, so their bytes, and what follows from them, are made once and looked up afterwards, on both sides.

Strides travel, because kernels choose their way by them and so the last bits depend on them. What goes over
the wire is *dense*: a dimension of stride 0 shrunk to one, gaps left out, in the order of memory.
"""

import math
import pickle
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from axrt.payload import Place


class Spec(NamedTuple):
    """What a tensor is, and how it lies in memory.

    Args:
        dtype: element type.
        shape: sizes.
        strides: in elements, as on the sender.
        requires_grad: whether a gradient is wanted back for it.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "Spec":
        return cls(tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.requires_grad)


class Layout:
    """How a tensor of some spec travels; worked out once.

    Args:
        spec: of the tensor.
    Attributes:
        num_bytes: what travels.
    """

    __slots__ = ("_in_memory", "_order", "_plain", "_wire_shape", "num_bytes", "spec")

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self._wire_shape = _without_repetition(spec.shape, spec.strides)
        self._order = _memory_order(self._wire_shape, spec.strides)
        self._in_memory = [self._wire_shape[d] for d in self._order]
        self._plain = self._wire_shape == spec.shape and spec.strides == _contiguous(spec.shape)
        self.num_bytes = math.prod(self._wire_shape) * spec.dtype.itemsize

    def allocate(self, device: torch.device) -> Tensor:
        """Memory for what arrives: `num_bytes` from its `data_ptr` on. To be given to `settle` once the bytes have come."""
        tensor = torch.empty(self._in_memory, dtype=self.spec.dtype, device=device)
        return tensor if self._plain else tensor.permute(sorted(range(len(self._order)), key=self._order.__getitem__))

    def settle(self, tensor: Tensor) -> Tensor:
        """Give what has arrived the sender's shape, strides and wish for a gradient; copies only where the sender's memory had gaps."""
        if not self._plain:
            tensor = self._as_sent(tensor)
        return tensor.requires_grad_() if self.spec.requires_grad else tensor

    def _as_sent(self, tensor: Tensor) -> Tensor:
        spec = self.spec
        if not _same_memory(tensor, spec.strides):
            gapped = torch.empty_strided(self._wire_shape, spec.strides, dtype=spec.dtype, device=tensor.device)
            tensor = gapped.copy_(tensor)
        return tensor.as_strided(spec.shape, spec.strides)


def describe(skeleton: object, specs: tuple[Spec, ...]) -> bytes:
    """Skeleton and specs as bytes."""
    only_tensors = isinstance(skeleton, Place) or (isinstance(skeleton, tuple) and all(isinstance(p, Place) for p in skeleton))
    # Only these may share a cache entry: elsewhere True, 1 and 1.0 would be taken for each other.
    return _describe_tensors(skeleton, specs) if only_tensors else pickle.dumps((skeleton, specs))


@lru_cache(maxsize=256)
def _describe_tensors(skeleton: object, specs: tuple[Spec, ...]) -> bytes:
    return pickle.dumps((skeleton, specs))


@lru_cache(maxsize=256)
def read_description(description: bytes) -> tuple[object, list[Layout]]:
    """The skeleton and the layouts that `describe` has described. The bytes come from a rank of the same job, which runs the same code."""
    skeleton, specs = pickle.loads(description)
    return skeleton, [Layout(spec) for spec in specs]


def dense(tensor: Tensor) -> Tensor:
    """A tensor without a graph whose memory, from its `data_ptr` on, is what travels; the given one's own where that is so."""
    tensor = tensor.detach()
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    if not tensor.is_contiguous():
        narrow = tensor.as_strided(_without_repetition(tuple(tensor.shape), tensor.stride()), tensor.stride())
        tensor = narrow.permute(_memory_order(tuple(narrow.shape), narrow.stride())).contiguous()
    return tensor.resolve_conj().resolve_neg()


def _without_repetition(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with one value where a dimension of stride 0 repeats it."""
    return tuple(1 if stride == 0 and size > 1 else size for size, stride in zip(shape, strides, strict=True))


def _memory_order(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    """Dimensions from the outermost in memory to the innermost; those of size one go outermost, where they move nothing."""
    return sorted(range(len(shape)), key=lambda d: (shape[d] != 1, -strides[d]))


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a fresh tensor."""
    return torch.empty(shape, device="meta").stride()


def _same_memory(tensor: Tensor, strides: tuple[int, ...]) -> bool:
    """These strides differ from the tensor's only where they move nothing: in dimensions of size one, or in an empty tensor."""
    if tensor.numel() == 0:
        return True
    return all(size == 1 or mine == its for size, mine, its in zip(tensor.shape, tensor.stride(), strides, strict=True))
