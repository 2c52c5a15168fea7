"""Flat memory: one stretch for many tensors, which are views of it.

Transfers, sums and shards work on the one stretch; layers and optimizers see views with shapes and
strides of their own. Views begin at multiples of 64 bytes, as torch's own memory does, since the
last bits of a matrix product may depend on that.
"""

from collections.abc import Hashable, Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

_ALIGNMENT_BYTES = 64


class FlatBuffer:
    """One stretch of memory.

    Args:
        like: tensors of one type. Each view has the shape of one of them, and its strides where its
            memory has no gaps.
        device: device that the memory is on (its tier).
        dtype: type of the memory; None: that of `like`.
        narrowest: narrowest type in which there is memory of this layout; None: that of `like`.
            Views and shards begin at the same elements in each of these types.
        filled: True to begin with zeros; False where all of it is about to be written.
    Attributes:
        flat: the whole stretch, shape (elements,), gaps between views included; gaps hold zeros.
        views: one view for each of `like`, in order; each has a version counter of its own.
    """

    def __init__(
        self,
        like: Sequence[Tensor],
        device: torch.device,
        dtype: torch.dtype | None = None,
        narrowest: torch.dtype | None = None,
        filled: bool = True,
    ) -> None:
        own = like[0].dtype if like else torch.float32
        self.dtype = dtype or own
        self._unit = max(1, _ALIGNMENT_BYTES // (narrowest or own).itemsize)
        sizes = [-(-tensor.numel() // self._unit) * self._unit for tensor in like]
        offsets = [0, *accumulate(sizes)]
        make = torch.zeros if filled else torch.empty
        self.flat = make(offsets[-1], dtype=self.dtype, device=device)
        self.views = [
            # `.data`: views share one version counter otherwise, and nobody could tell which was
            # written to.
            self.flat.as_strided(tensor.shape, _dense_strides(tensor), offset).data
            for tensor, offset in zip(like, offsets[:-1], strict=True)
        ]

    @property
    def num_bytes(self) -> int:
        """Size of the whole stretch, in bytes."""
        return self.flat.nbytes

    def shard(self, index: int, count: int) -> Tensor:
        """View `index` of the stretch cut into `count` consecutive ones, as equal as alignment lets
        them be."""
        units = self.flat.numel() // self._unit
        begin, end = (units * one // count * self._unit for one in (index, index + 1))
        return self.flat[begin:end]

    def adopt(self, tensors: Sequence[Tensor]) -> None:
        """Move the values of tensors here, one for each view; the tensors stay the same objects."""
        with torch.no_grad():
            for tensor, view in zip(tensors, self.views, strict=True):
                view.copy_(tensor)
                tensor.data = view


def can_be_flat(tensor: Tensor) -> bool:
    """A view can stand in for the tensor, since it is nothing but elements in memory."""
    data = tensor.data
    return (
        type(data) is Tensor
        and data.layout is torch.strided
        and not data.is_nested
        and not data.is_quantized
    )


def adopt(tensors: Sequence[Tensor], device: torch.device) -> None:
    """Move tensors into flat memory, those of a type together, unless one of them is more than its
    elements; the tensors stay the same objects."""
    for group in by_key(tensor.dtype for tensor in tensors):
        of_type = [tensors[place] for place in group]
        if all(map(can_be_flat, of_type)):
            FlatBuffer(of_type, device).adopt(of_type)  # the views keep the memory


def by_key(keys: Iterable[Hashable]) -> list[list[int]]:
    """The indices of equal keys, such as types of tensors, in the order in which keys come."""
    places: dict[Hashable, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    return list(places.values())


def _dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's strides where its memory has no gaps or repetition, else those of a fresh
    tensor."""
    return torch.empty_like(tensor, device="meta", requires_grad=False).stride()
