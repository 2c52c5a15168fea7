"""How a payload lies on the wire."""

# Its skeleton and one *spec* a tensor (dtype, shape, strides, requires_grad) are small and repeat
# from microbatch to microbatch. So their bytes and the layouts that follow from them are made once
# and looked up afterwards, on both sides.
#
# Strides travel, because kernels choose their way by them and so the last bits depend on them. The
# elements on the wire are *dense*: a dimension of stride 0 shrunk to one, gaps left out, in the
# order of memory.

import math
import pickle
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from axrt.errors import OutputTypeError

from .payload import ONLY, Slot

# Quantized types keep a scale beside their numbers, and torch has no copies of integers of less
# than a byte.
_QUANTIZED = ("qint8", "quint8", "qint32", "quint4x2", "quint2x4")
_NOT_COPIED = {
    getattr(torch, name, None)
    for name in (*_QUANTIZED, *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)))
}


class Spec(NamedTuple):
    """The type of a tensor, and how it lies in memory."""

    dtype: torch.dtype  # element type
    shape: tuple[int, ...]  # sizes of the dimensions
    strides: tuple[int, ...]  # strides of the dimensions, in elements, as on the sender
    requires_grad: bool  # True if the sender wants a gradient back for it
    # True if it was in CPU memory on the sender, and so will be on the receiver
    on_host: bool = True

    @classmethod
    def of(cls, tensor: Tensor) -> "Spec":
        """The spec of a tensor.

        Raises:
            OutputTypeError: the tensor is no array of numbers in memory, as a nested one.
        """
        try:
            return cls(
                tensor.dtype,
                tuple(tensor.shape),
                tensor.stride(),
                tensor.requires_grad,
                tensor.is_cpu,
            )
        except RuntimeError:
            raise OutputTypeError(
                f"a tensor of class {type(tensor).__name__} cannot travel between stages; expected "
                "dense tensors"
            ) from None


class Layout:
    """How a tensor of some spec travels; worked out once.

    A row of elements travels, in the order of the sender's memory. It arrives in memory of its own
    and is then given shape and strides: exactly the sender's, in dimensions of size 0 and 1 too.

    Attributes:
        num_bytes: number of bytes that travel.
    """

    __slots__ = (
        "_arriving",
        "_in_memory",
        "_packed",
        "_plain",
        "_to_shape",
        "_wire_shape",
        "num_bytes",
        "spec",
    )

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self._wire_shape = _without_repetition(spec.shape, spec.strides)
        order = _memory_order(self._wire_shape, spec.strides)
        # from the order of memory back to that of the shape
        self._to_shape = sorted(range(len(order)), key=order.__getitem__)
        self._in_memory = tuple([self._wire_shape[d] for d in order])
        self._plain = spec.strides == _contiguous(spec.shape)
        self._packed = _same_memory(
            self._in_memory, _contiguous(self._in_memory), [spec.strides[d] for d in order]
        )
        elements = math.prod(self._wire_shape)
        self._arriving = spec.shape if self._plain else (elements,)
        self.num_bytes = elements * spec.dtype.itemsize

    def allocate(self, device: torch.device) -> Tensor:
        """Memory for a tensor that arrives: `num_bytes` from its `data_ptr` on.

        It is to be given to `settle` once the bytes have come.
        """
        return torch.empty(self._arriving, dtype=self.spec.dtype, device=device)

    def shaped(self, row: Tensor) -> Tensor:
        """The same, in given memory: `row` is uint8 of shape (num_bytes,)."""
        return row.view(self.spec.dtype).view(self._arriving)

    def settle(self, tensor: Tensor) -> Tensor:
        """Give an arrived tensor the sender's shape, strides and `requires_grad`.

        It copies only where the sender's memory had gaps.
        """
        if not self._plain:
            tensor = self._as_sent(tensor)
        return tensor.requires_grad_() if self.spec.requires_grad else tensor

    def _as_sent(self, row: Tensor) -> Tensor:
        spec = self.spec
        if not self._packed:
            gapped = torch.empty_strided(
                self._wire_shape, spec.strides, dtype=spec.dtype, device=row.device
            )
            row = gapped.copy_(row.view(self._in_memory).permute(self._to_shape))
        return row.as_strided(spec.shape, spec.strides)


def describe(skeleton: object, specs: tuple[Spec, ...]) -> bytes:
    """Skeleton and specs as bytes.

    Raises:
        OutputTypeError: there are tensors of a type that torch itself cannot copy.
    """
    if skeleton is ONLY:
        return _described_alone(specs[0])
    only_tensors = isinstance(skeleton, Slot) or (
        isinstance(skeleton, tuple) and all(isinstance(p, Slot) for p in skeleton)
    )
    # Only these may share a cache entry: elsewhere True, 1 and 1.0 would be taken for each other.
    return _described_once(skeleton, specs) if only_tensors else _described(skeleton, specs)


def _described(skeleton: object, specs: tuple[Spec, ...]) -> bytes:
    for spec in specs:
        if spec.dtype in _NOT_COPIED:
            raise OutputTypeError(
                f"a tensor of {spec.dtype} cannot travel between stages; expected a type that "
                "torch can copy"
            )
    return pickle.dumps((skeleton, specs))


_described_once = lru_cache(maxsize=256)(_described)


@lru_cache(maxsize=256)
def _described_alone(spec: Spec) -> bytes:
    return _described(ONLY, (spec,))


@lru_cache(maxsize=256)
def read_description(description: bytes) -> tuple[object, list[Layout]]:
    """The skeleton and the layouts that `describe` has described.

    The bytes are unpickled: they come from a rank of the same job, which runs the same code.
    """
    skeleton, specs = pickle.loads(description)
    # What is unpickled is another object, and this one is known by its identity.
    return ONLY if skeleton == ONLY else skeleton, [Layout(spec) for spec in specs]


def dense(tensor: Tensor) -> Tensor:
    """A tensor without a graph whose memory, from its `data_ptr` on, is the row of elements that
    travels.

    It shares the given tensor's memory where that is dense already; else it is a copy.
    """
    tensor = tensor.detach()
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    if not tensor.is_contiguous():
        narrow = tensor.as_strided(
            _without_repetition(tuple(tensor.shape), tensor.stride()), tensor.stride()
        )
        tensor = narrow.permute(_memory_order(tuple(narrow.shape), narrow.stride())).contiguous()
    return tensor.resolve_conj().resolve_neg()


def _without_repetition(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with one value where a dimension of stride 0 repeats it."""
    return tuple(
        1 if stride == 0 and size > 1 else size for size, stride in zip(shape, strides, strict=True)
    )


def _memory_order(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    """Dimensions from the outermost in memory to the innermost; those of size one go outermost,
    where they move nothing."""
    return sorted(range(len(shape)), key=lambda d: (shape[d] != 1, -strides[d]))


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a fresh tensor."""
    return torch.empty(shape, device="meta").stride()


def _same_memory(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Two strides differ at most where they move nothing: in dimensions of size one, or in an empty
    tensor."""
    return 0 in shape or all(
        size == 1 or mine == its for size, mine, its in zip(shape, one, other, strict=True)
    )
