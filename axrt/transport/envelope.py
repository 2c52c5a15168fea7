"""The form of a parcel on the wire; the same bytes under every transport."""

#   envelope     way | header | description | the bytes of its small tensors, one after the other
#   beside it    each large tensor, straight from the sender's memory into the receiver's
#
# The way, one byte, says whether large tensors come by MPI or by a library (`lines.py`).
#
# The header says
#
#   1. the generation, the meaning or topic, and the address: stage, number, pipe, bucket; of a
#      control message its `about` and `number`;
#   2. the length of the description. `wire.py` says what it describes.
#
# A transport only carries the bytes.

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from axrt.device.device import CPU
from axrt.scheduler.message import Meaning, Message
from axrt.scheduler.task import Vocabulary

from .control import ControlMessage, Topic
from .landing import Landings, fits
from .payload import ONLY, flatten, unflatten
from .transport import Parcel
from .wire import Layout, Spec, dense, describe, read_description

_HEADER = struct.Struct("<iBiqiiI")
BY_MPI, BY_LINE = b"\0", b"\1"
_WORDS: tuple[Vocabulary, ...] = (*Meaning, *Topic)
_CODE_OF = {word: code for code, word in enumerate(_WORDS)}
_NOWHERE = (0, 0, 0, 0)
_WAY_BYTES = 1
_SMALL_BYTES = 32 * 1024


@dataclass(slots=True)
class Arriving:
    """A parcel whose envelope has been read."""

    # generation, message: generation and message of the parcel
    generation: int
    message: Message | ControlMessage
    skeleton: object  # skeleton of its payload, see `payload.flatten`
    layouts: list[Layout]  # layouts of its tensors, in order
    # memory for each tensor, as `Layout.allocate` gives it; that of small ones is filled
    tensors: list[Tensor]
    large: list[Tensor]  # memory for the tensors that come beside the envelope, in order

    def parcel(self) -> Parcel:
        """The parcel that was sent; to be called once all bytes are here."""
        if self.skeleton is ONLY:
            payload = self.layouts[0].settle(self.tensors[0])
            return Parcel(self.generation, self.message, payload)
        tensors = [
            layout.settle(tensor) for tensor, layout in zip(self.tensors, self.layouts, strict=True)
        ]
        return Parcel(self.generation, self.message, unflatten(self.skeleton, tensors))


def is_large(num_bytes: int) -> bool:
    """A tensor of that size travels beside its envelope."""
    return num_bytes > _SMALL_BYTES


def pack(parcel: Parcel) -> tuple[bytes, list[Tensor]]:
    """Prepare a parcel for the wire.

    Returns:
        The header with the description; and the tensors of the payload in order, dense and without
        a graph. Tensors that are contiguous keep their memory, so the sender must not change it.
    Raises:
        TypeError: the payload holds something that cannot travel.
    """
    generation, (word, *address), payload = parcel
    skeleton, tensors = flatten(payload)
    if skeleton is ONLY:
        description, on_the_wire = describe(skeleton, (Spec.of(payload),)), [dense(payload)]
    else:
        description = describe(skeleton, tuple([Spec.of(tensor) for tensor in tensors]))
        on_the_wire = [dense(tensor) for tensor in tensors]
    head = (
        _HEADER.pack(
            generation, _CODE_OF[word], *address, *_NOWHERE[len(address) :], len(description)
        )
        + description
    )
    return head, on_the_wire


def seal(head: bytes, tensors: list[Tensor], way: bytes = BY_MPI) -> bytes:
    """The envelope, made of the result of `pack`; it reads the small tensors' memory now."""
    small = [_memory_of(tensor) for tensor in tensors if tensor.nbytes <= _SMALL_BYTES]
    return b"".join([way, head, *small])


def is_by_line(envelope: bytearray) -> bool:
    """Its large tensors come by a library."""
    return envelope.startswith(BY_LINE)


def open_envelope(
    envelope: bytearray, allocate: Callable[[Layout], Tensor], landings: Landings
) -> Arriving:
    """Read an envelope.

    Args:
        envelope: bytes that `seal` has made.
        allocate: function that allocates memory for a large tensor, or for one that goes on to a
            device; called in the order in which they come.
    """
    generation, code, *address, length = _HEADER.unpack_from(envelope, _WAY_BYTES)
    at = _WAY_BYTES + _HEADER.size + length
    skeleton, layouts = read_description(bytes(envelope[at - length : at]))
    word = _WORDS[code]
    message = (
        Message(word, *address) if isinstance(word, Meaning) else ControlMessage(word, *address[:2])
    )
    buffers = landings.take(generation, message)
    tensors: list[Tensor] = []
    large: list[Tensor] = []
    for place, layout in enumerate(layouts):
        if layout.num_bytes > _SMALL_BYTES:  # `is_large`, without a call
            fitting = place < len(buffers) and fits(buffers[place], layout)
            tensor = buffers[place] if fitting else allocate(layout)
            large.append(tensor)
        else:
            tensor = layout.allocate(CPU) if layout.spec.on_host else allocate(layout)
            _copy_from(envelope, at, layout.num_bytes, tensor)
            at += layout.num_bytes
        tensors.append(tensor)
    return Arriving(generation, message, skeleton, layouts, tensors, large)


def _memory_of(tensor: Tensor) -> ctypes.Array[ctypes.c_char]:
    """The memory of a dense tensor on the CPU, as a buffer; the caller keeps the tensor alive."""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())


def _copy_from(envelope: bytearray, at: int, num_bytes: int, tensor: Tensor) -> None:
    """Put a small tensor's bytes out of its envelope into its own memory.

    They are copied, not viewed: torch's own memory is aligned, and last bits may depend on that.
    """
    part = memoryview(envelope)[at : at + num_bytes]
    _memory_of(tensor).raw = part  # type: ignore[assignment]  # any buffer will do
