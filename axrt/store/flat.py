"""Flat memory: one stretch for many tensors, which are views of it.

What moves, is added up or is cut into shards is one tensor; what layers and optimizers see has its
own shape and strides. Views begin at multiples of 64 bytes, as torch's own memory does, since the
last bits of a matrix product may depend on that.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

_ALIGNMENT_BYTES = 64


class FlatBuffer:
    """One stretch of memory.

    Args:
        like: tensors of one type; each view has the shape and, where its memory has no gaps, the
            strides of one of them.
        device: where the memory is (its tier).
    Attributes:
        flat: all of it, shape (elements,), gaps between views included; gaps hold zeros.
        views: one for each of `like`, in order; each has a version counter of its own.
    """

    def __init__(self, like: Sequence[Tensor], device: torch.device) -> None:
        self.dtype = like[0].dtype if like else torch.float32
        self._unit = max(1, _ALIGNMENT_BYTES // self.dtype.itemsize)
        sizes = [-(-tensor.numel() // self._unit) * self._unit for tensor in like]
        offsets = [0, *accumulate(sizes)]
        self.flat = torch.zeros(offsets[-1], dtype=self.dtype, device=device)
        self.views = [
            # `.data`: views share one version counter otherwise, and nobody could tell which was
            # written to.
            self.flat.as_strided(tensor.shape, _dense_strides(tensor), offset).data
            for tensor, offset in zip(like, offsets[:-1], strict=True)
        ]

    @property
    def num_bytes(self) -> int:
        """Of the whole stretch."""
        return self.flat.nbytes

    def shards(self, count: int) -> list[Tensor]:
        """The stretch in so many consecutive pieces, views, as equal as alignment lets them be."""
        units = self.flat.numel() // self._unit
        ends = [units * shard // count * self._unit for shard in range(count + 1)]
        return [self.flat[begin:end] for begin, end in pairwise(ends)]

    def adopt(self, tensors: Sequence[Tensor]) -> None:
        """Move the values of tensors, one for each view, here; the tensors stay the same
        objects."""
        with torch.no_grad():
            for tensor, view in zip(tensors, self.views, strict=True):
                view.copy_(tensor)
                tensor.data = view


def can_be_flat(tensor: Tensor) -> bool:
    """The tensor is nothing but elements in memory, so that a view can stand in for it."""
    data = tensor.data
    return (
        type(data) is Tensor
        and data.layout is torch.strided
        and not data.is_nested
        and not data.is_quantized
    )


def by_dtype(tensors: Sequence[Tensor]) -> list[list[int]]:
    """The places of tensors of each type, types in the order in which they come."""
    places: dict[torch.dtype, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault(tensor.dtype, []).append(place)
    return list(places.values())


def _dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Those of the tensor where its memory has no gaps and nothing twice, else those of a fresh
    tensor."""
    return torch.empty_like(tensor, device="meta", requires_grad=False).stride()
