"""What autograd saves in the forward of a microbatch, for its memory to leave the device and come
back before its backward."""

# Each tensor that autograd saves is packed into a *holder*, which has an alias of it: another
# tensor of the same memory and the same version counter. Its memory may be exchanged, as that of a
# hollow tensor is (`store/flat.py`), so shape, strides, offset and version stay what they are.
# Tensors that share memory are copied once, and share it again when they are back.
#
# Nothing is taken from anybody else. Memory is let go by the holders alone: what the network,
# another stage or the user also refers to stays until they let it go. What is changed in place
# between the forward and the backward is found by the version counter, as autograd itself does it,
# wherever the memory is. Holders belong to the graph, which frees them node by node in its
# backward.
#
# These stay where they are: weights and buffers; what is not on the stage's device; tensors of
# subclasses or without strides; and all that a layer keeps without autograd.
#
# A forward runs under autograd's hooks for saved tensors. The `.data` of a holder's alias is
# exchanged for a hollow tensor when the copy down has ended, and for a view of new memory when the
# copy up has. On a device new memory belongs to the stream that copies up, and the stream that
# computes is recorded on it.

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from axrt.device.device import is_on_host
from axrt.device.queues import current_stream
from axrt.errors import ModelError
from axrt.store.flat import hollow

ALIGNMENT = 64  # bytes, as torch's own memory has: the bits of a product may depend on that


class _Layout(NamedTuple):
    """The layout of a tensor in its memory, in elements."""

    shape: torch.Size
    strides: tuple[int, ...]
    offset: int


class Holder:
    """A saved tensor, whose memory may go and come.

    Args:
        may_leave: its memory may leave the device.
    """

    __slots__ = ("__weakref__", "away", "may_leave", "tensor", "version")

    def __init__(self, tensor: Tensor, may_leave: bool) -> None:
        self.tensor, self.version = tensor.detach(), tensor._version
        self.may_leave = may_leave
        self.away: _Layout | None = None  # where it was, while its memory is elsewhere

    def let_go(self) -> None:
        """Let its memory go."""
        tensor = self.tensor
        self.away = _Layout(tensor.shape, tensor.stride(), int(tensor.storage_offset()))
        tensor.data = hollow(tensor)

    def take_back(self, whole: Tensor) -> None:
        """Have memory of the same contents again.

        Args:
            whole: tensor of the same type that begins where that memory begins.
        """
        assert self.away is not None, "what comes back has been let go before"
        shape, strides, offset = self.away
        self.tensor.data = whole.as_strided(shape, strides, int(whole.storage_offset()) + offset)
        self.away = None


class _Place(NamedTuple):
    """Tensors that share memory."""

    holders: list[Holder]  # their holders
    start: int  # offset of that memory among all of it that leaves, in bytes
    num_bytes: int  # its size


class SavedTensors:
    """What autograd saves of one microbatch on a stage.

    Args:
        is_own: function that says whether a tensor is a weight or a buffer of the stage.
    """

    def __init__(self, device: torch.device, is_own: Callable[[Tensor], bool]) -> None:
        self._device, self._is_own = device, is_own
        self._holders: list[weakref.ref[Holder]] = []
        self._places: list[_Place] = []

    def saving(self) -> AbstractContextManager[object]:
        """Context of the forward."""
        return saved_tensors_hooks(self._pack, unpack)

    def measure(self) -> int:
        """Find what may leave now; returns its size in bytes, gaps included."""
        found: dict[int, list[Holder]] = {}
        for holder in (ref() for ref in self._holders):
            if holder is not None and holder.may_leave:
                found.setdefault(memory_of(holder.tensor), []).append(holder)
        self._places, end = [], 0
        for holders in found.values():
            num_bytes = holders[0].tensor.untyped_storage().nbytes()
            self._places.append(_Place(holders, end, num_bytes))
            end += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return end

    def copy_to(self, memory: Tensor) -> None:
        """Copy what leaves.

        Args:
            memory: uint8, of at least as many bytes as were measured.
        """
        for holders, start, num_bytes in self._places:
            whole = _bytes_of(holders)
            memory[start : start + min(num_bytes, len(whole))].copy_(whole)

    def stay(self) -> None:
        """Leave what was measured where it is."""
        self._places = []

    def let_go(self) -> None:
        """Let the memory of what was copied go."""
        for holders, _, _ in self._places:
            for holder in holders:
                holder.let_go()

    def take_back(self, memory: Tensor) -> None:
        """Let tensors be views of memory that has what was copied.

        Args:
            memory: as for `copy_to`, from a multiple of `ALIGNMENT` bytes on. The caller's stream
                reads it from now on.
        """
        if not is_on_host(memory):  # it is of the stream that has copied
            memory.record_stream(current_stream(memory.device))
        for holders, start, num_bytes in self._places:
            for holder in holders:
                holder.take_back(_whole(memory, start, num_bytes, holder.tensor.dtype))
        self._places = []

    def _pack(self, tensor: Tensor) -> Holder:
        holder = Holder(tensor, self._may_leave(tensor))
        self._holders.append(weakref.ref(holder))
        return holder

    def _may_leave(self, tensor: Tensor) -> bool:
        return (
            type(tensor) in (Tensor, nn.Parameter)
            and tensor.device == self._device
            and may_be_exchanged(tensor)
            and not self._is_own(tensor)
        )


def may_be_exchanged(tensor: Tensor) -> bool:
    """The memory of a tensor of no subclass may go and come."""
    return (
        tensor.layout is torch.strided
        and tensor.numel() > 0
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
    )


def unpack(holder: Holder) -> Tensor:
    """A saved tensor, for autograd.

    Raises:
        RuntimeError: it was changed in place since.
        ModelError: its memory is not here.
    """
    tensor = holder.tensor
    if holder.away is not None:
        raise ModelError(
            f"what autograd has saved, a tensor of shape {tuple(tensor.shape)}, is read while its "
            "memory is away: something of a layer went past its output to a later one; expected "
            "all that passes between layers, or pieces of a layer, to be inputs and outputs"
        )
    if tensor._version != holder.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a tensor of shape {tuple(tensor.shape)} and type {tensor.dtype} is at "
            f"version {tensor._version}; expected version {holder.version}, which it had in the "
            "forward. Look for an operation that changes it, or clone what is changed"
        )
    return tensor


def memory_of(tensor: Tensor) -> int:
    """What a tensor is in, also where that has no memory for a time."""
    return int(tensor.untyped_storage()._cdata)


def _bytes_of(holders: Sequence[Holder]) -> Tensor:
    """All memory that tensors are in, uint8."""
    narrowest = min((holder.tensor for holder in holders), key=lambda one: one.itemsize)
    whole = narrowest.untyped_storage().nbytes() // narrowest.itemsize
    return narrowest.as_strided((whole,), (1,), 0).view(torch.uint8)


def _whole(memory: Tensor, start: int, num_bytes: int, dtype: torch.dtype) -> Tensor:
    """A place in memory that has come back."""
    return memory[start : start + num_bytes // dtype.itemsize * dtype.itemsize].view(dtype)
