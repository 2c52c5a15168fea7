"""Flat memory: one stretch for many tensors, which are views of it."""

# Transfers, sums and shards work on the one stretch; layers and optimizers see views with shapes
# and strides of their own. Views begin at multiples of 64 bytes, as torch's own memory does, since
# the last bits of a matrix product may depend on that.

import math
from collections.abc import Hashable, Iterable, Sequence
from ctypes import c_ubyte
from functools import cached_property
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from axrt.device.device import is_on_host
from axrt.device.queues import current_stream

_ALIGNMENT_BYTES = 64


class Layout:
    """Where the views of a stretch begin.

    Args:
        like: tensors of one type. Each view has the shape of one of them, and its strides where its
            memory has no gaps.
        dtype: type of the memory; None: that of `like`.
        narrowest: narrowest type in which there is memory of this layout; None: that of `like`.
    Attributes:
        dtype: type of the memory.
        unit: views and shards begin at multiples of so many elements.
        elements: size of the stretch, in elements.
        offsets: element at which each view begins.
        sizes: number of elements of each view; the gap behind it does not count.
        is_contiguous: for each view, whether its elements are in memory in the order of its shape.
    """

    def __init__(
        self,
        like: Sequence[Tensor],
        dtype: torch.dtype | None = None,
        narrowest: torch.dtype | None = None,
    ) -> None:
        own = like[0].dtype if like else torch.float32
        self.dtype = dtype or own
        self.unit = max(1, _ALIGNMENT_BYTES // (narrowest or own).itemsize)
        self.sizes = [tensor.numel() for tensor in like]
        with_gaps = [-(-size // self.unit) * self.unit for size in self.sizes]
        *self.offsets, self.elements = 0, *accumulate(with_gaps)
        self._shapes = [(tensor.shape, _dense_strides(tensor)) for tensor in like]

    @cached_property
    def is_contiguous(self) -> list[bool]:
        return [strides == _strides(shape) for shape, strides in self._shapes]

    @property
    def num_bytes(self) -> int:
        """Size of the stretch, in bytes."""
        return self.elements * self.dtype.itemsize

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """The views of a stretch, shape (elements,); each has a version counter of its own."""
        return [
            # `.data`: views share one version counter otherwise, and nobody could tell which was
            # written to.
            flat.as_strided(shape, strides, flat.storage_offset() + offset).data
            for (shape, strides), offset in zip(self._shapes, self.offsets, strict=True)
        ]


class FlatBuffer:
    """One stretch of memory.

    Args:
        like: tensors of one type. Each view has the shape of one of them, and its strides where its
            memory has no gaps.
        dtype: type of the memory; None: that of `like`.
        narrowest: narrowest type in which there is memory of this layout; None: that of `like`.
            Views and shards begin at the same elements in each of these types.
        filled: True to begin with zeros; False where all of it is about to be written.
    Attributes:
        layout: where views begin.
        flat: the whole stretch, shape (elements,), gaps between views included; gaps hold zeros,
            or anything where the memory was let go.
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
        layout = Layout(like, dtype, narrowest)
        make = torch.zeros if filled else torch.empty
        self._take(layout, make(layout.elements, dtype=layout.dtype, device=device))

    @classmethod
    def within(cls, layout: Layout, memory: Tensor) -> Self:
        """A stretch of a layout at the beginning of some memory, uint8."""
        made = cls.__new__(cls)
        made._take(layout, memory[: layout.num_bytes].view(layout.dtype))
        return made

    @classmethod
    def unfilled(cls, layout: Layout, device: torch.device) -> Self:
        """A stretch of a layout in memory of its own, all of which is about to be written."""
        return cls.within(layout, torch.empty(layout.num_bytes, dtype=torch.uint8, device=device))

    def _take(self, layout: Layout, flat: Tensor) -> None:
        self.layout, self.dtype = layout, layout.dtype
        self.flat, self.views = flat, layout.views_of(flat)

    @property
    def num_bytes(self) -> int:
        """Size of the whole stretch, in bytes."""
        return self.flat.nbytes

    def shard(self, *cuts: tuple[int, int]) -> Tensor:
        """A part of the stretch.

        Args:
            cuts: (index, count) for each cut: part `index` of `count` consecutive ones, as equal as
                alignment lets them be; the next cut is of that part.
        """
        return self.shard_of(self.flat, *cuts)

    def shard_of(self, flat: Tensor, *cuts: tuple[int, int]) -> Tensor:
        """The same part of another stretch of this layout."""
        unit = self.layout.unit
        begin, end = 0, flat.numel() // unit
        for index, count in cuts:
            size = end - begin
            begin, end = (begin + size * one // count for one in (index, index + 1))
        return flat[begin * unit : end * unit]

    # Memory that is let go by resizing its storage may not be seen by numpy, which makes it fixed.
    # Scratch reads and writes by address.
    def let_go(self) -> None:
        """Let go of the memory. Views stay, also those that a graph has kept, and have no values
        until there is memory again."""
        if not is_on_host(self.flat):  # it may belong to a stream that has filled it
            self.flat.record_stream(current_stream(self.flat.device))
        self.flat.untyped_storage().resize_(0)

    def take_memory(self) -> None:
        """Have memory again, for the same views; its values are any."""
        self.flat.untyped_storage().resize_(self.layout.num_bytes)

    def adopt(self, tensors: Sequence[Tensor]) -> None:
        """Move the values of tensors here, one for each view; the tensors stay the same objects."""
        with torch.no_grad():
            for tensor, view in zip(tensors, self.views, strict=True):
                view.copy_(tensor)
                tensor.data = view


def hollow(
    like: Tensor, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> Tensor:
    """A tensor without memory, of the same shape: all elements are one nan.

    Args:
        like: tensor with that shape.
        dtype: type; None: that of `like`.
        device: device; None: that of `like`.
    """
    dtype = dtype or like.dtype
    number = math.nan if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), number, dtype=dtype, device=device or like.device).expand(like.shape)


def is_hollow(tensor: Tensor) -> bool:
    """The tensor's elements are one in memory."""
    return tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size()


def are_nan(tensors: Sequence[Tensor]) -> bool:
    """The element that each hollow tensor of a type has in memory is still nan; torch lets `fill_`
    write to it."""
    found = [one.detach()[(0,) * one.dim()] for one in tensors if one.numel()]
    return not found or bool(torch.stack(found).isnan().all())


def is_other(flat: Tensor, than: Tensor) -> Tensor:
    """Whether two stretches of flat memory have other bits; shape (), on their device, which is not
    waited for."""
    return flat.view(torch.int64).ne(than.view(torch.int64)).any()


def fingerprint(flat: Tensor) -> Tensor:
    """Numbers by which a change of flat memory is seen; int64, on its device, which is not waited
    for."""
    if is_on_host(flat):
        return torch.tensor(digest_of(flat) - (1 << 63))  # within int64
    return sums_of(flat.view(torch.int64))


# What is watched on the device are sums of words with odd factors. Even factors were tried: they
# lose the highest bit, so a quarter of all changes of one sign were not seen.
def sums_of(words: Tensor) -> Tensor:
    """Two sums of int64 words modulo 2^64, shape (2,), which have the same bits in any order of
    summation. One knows of a word in which column it is, the other in which row."""
    # Factors are odd: an even one would lose the highest bit, which is a sign of the values.
    square = math.isqrt(len(words))
    rows, rest = words[: square * square].view(square, square), words[square * square :]
    odd = words.new_ones(2 * square + 1).cumsum(0) * 2 - 1  # the rest has at most so many
    of_rest = (rest * odd[: len(rest)]).sum()
    of_columns, of_rows = (rows.sum(0) * odd[:square]).sum(), (rows.sum(1) * odd[:square]).sum()
    return torch.stack([of_columns + of_rest, of_rows - of_rest])


def digest_of(tensor: Tensor) -> int:
    """A digest of the values of a tensor on the CPU, by which a change is seen."""
    values = tensor.detach().contiguous()
    # Not as an array of numpy: torch would not resize memory again that such an array has seen.
    return xxh3_64_intdigest((c_ubyte * values.nbytes).from_address(values.data_ptr()))


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
        if all(map(can_be_flat, of_type)) and not _are_flat(of_type):
            FlatBuffer(of_type, device).adopt(of_type)  # the views keep the memory


def flat_like(
    like: Sequence[Tensor], types: Sequence[torch.dtype], device: torch.device
) -> list[Tensor]:
    """Tensors without values in flat memory, those of a type together.

    Args:
        like: for each, a tensor with its shape and strides.
        types: type of each.
    """
    made = list(like)
    for group in by_key(types):
        dtype, of_type = types[group[0]], [like[place].detach() for place in group]
        buffer = FlatBuffer(of_type, device, dtype, narrowest=dtype, filled=False)
        for place, view in zip(group, buffer.views, strict=True):
            made[place] = view
    return made


def _are_flat(tensors: Sequence[Tensor]) -> bool:
    """They are views of one stretch already, as `adopt` lays it out."""
    layout, memory = Layout(tensors), tensors[0].untyped_storage()
    return memory.nbytes() == layout.num_bytes and all(
        tensor.untyped_storage().data_ptr() == memory.data_ptr()
        and tensor.storage_offset() == offset
        for tensor, offset in zip(tensors, layout.offsets, strict=True)
    )


def by_key(keys: Iterable[Hashable]) -> list[list[int]]:
    """The indices of equal keys, such as types of tensors, in the order in which keys come."""
    places: dict[Hashable, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    return list(places.values())


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's strides where its memory has no gaps or repetition, else those of a fresh
    tensor."""
    return torch.empty_like(tensor, device="meta", requires_grad=False).stride()
