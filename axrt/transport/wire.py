"""How a payload lies on the wire.

Its skeleton and one *spec* a tensor (dtype, shape, strides, requires_grad) are small and repeat from microbatch to
microbatch, so their bytes are made once and looked up afterwards, on both sides.

Strides travel, because kernels choose their way by them and so the last bits depend on them. What goes over
the wire is *dense*: a dimension of stride 0 shrunk to one, gaps left out, in the order of memory.
"""

import math
import pickle
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from axrt.payload import Place


@dataclass(frozen=True, slots=True)
class Spec:
    """How a tensor lies in memory.

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

    @property
    def wire_shape(self) -> tuple[int, ...]:
        """The shape without repetition: a dimension of stride 0 holds one value."""
        return tuple(1 if stride == 0 and size > 1 else size for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def num_bytes(self) -> int:
        """What travels."""
        return math.prod(self.wire_shape) * self.dtype.itemsize


def describe(skeleton: object, specs: tuple[Spec, ...]) -> bytes:
    """Skeleton and specs as bytes."""
    only_tensors = isinstance(skeleton, Place) or (isinstance(skeleton, tuple) and all(isinstance(p, Place) for p in skeleton))
    # Only these may share a cache entry: elsewhere True, 1 and 1.0 would be taken for each other.
    return _describe_tensors(skeleton, specs) if only_tensors else pickle.dumps((skeleton, specs))


@lru_cache(maxsize=256)
def _describe_tensors(skeleton: object, specs: tuple[Spec, ...]) -> bytes:
    return pickle.dumps((skeleton, specs))


@lru_cache(maxsize=256)
def read_description(description: bytes) -> tuple[object, tuple[Spec, ...]]:
    """The inverse of `describe`. The bytes come from a rank of the same job, which runs the same code."""
    skeleton, specs = pickle.loads(description)
    return skeleton, specs


def dense(tensor: Tensor) -> Tensor:
    """The values that travel, in the order of the sender's memory; the tensor's own memory where that has no gaps.

    Returns:
        shape (number of bytes,), uint8, on the tensor's device.
    """
    tensor = tensor.detach()
    if not tensor.is_contiguous():
        narrow = tensor.as_strided(Spec.of(tensor).wire_shape, tensor.stride())
        tensor = narrow.permute(_memory_order(tuple(narrow.shape), narrow.stride())).contiguous()
    tensor = tensor.resolve_conj().resolve_neg()
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)  # not view(-1): that keeps the stride of a lone element


def allocate(spec: Spec, device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory for a tensor that is about to arrive.

    Returns:
        The tensor, to be given to `settle` once its bytes have come, and the bytes to receive into, shape (num_bytes,), uint8.
    """
    shape = spec.wire_shape
    order = _memory_order(shape, spec.strides)
    flat = torch.empty(math.prod(shape), dtype=spec.dtype, device=device)
    in_order = flat.view([shape[d] for d in order])
    return in_order.permute(sorted(range(len(order)), key=order.__getitem__)), flat.view(torch.uint8)


def settle(narrow: Tensor, spec: Spec) -> Tensor:
    """Give what has arrived the sender's shape, strides and wish for a gradient; copies only where the sender's memory had gaps."""
    if not _same_memory(narrow, spec):
        gapped = torch.empty_strided(spec.wire_shape, spec.strides, dtype=spec.dtype, device=narrow.device)
        narrow = gapped.copy_(narrow)
    if narrow.stride() != spec.strides or narrow.shape != spec.shape:
        narrow = narrow.as_strided(spec.shape, spec.strides)
    return narrow.requires_grad_(spec.requires_grad)


def _same_memory(narrow: Tensor, spec: Spec) -> bool:
    """The strides differ only where they move nothing: in dimensions of size one, or in an empty tensor."""
    if narrow.numel() == 0:
        return True
    return all(size == 1 or mine == its for size, mine, its in zip(narrow.shape, narrow.stride(), spec.strides, strict=True))


def _memory_order(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    """Dimensions from the outermost in memory to the innermost; those of size one go outermost, where they move nothing."""
    return sorted(range(len(shape)), key=lambda d: (shape[d] != 1, -strides[d]))
