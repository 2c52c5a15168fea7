"""Where a tensor's bytes are while MPI reads or writes them."""

# MPI touches memory from the CPU, and a device's memory only where the library is aware of devices.
# So tensors that travel are *staged*: used where they are (`InPlace`), or copied through pinned CPU
# memory (`Pinned`). Copies run on queues of their own, one out and one in, so that neither the loop
# nor a task waits for a copy, nor a copy for later tasks. A tensor that was on the sender's host
# arrives on the host.

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from axrt.device.device import CPU, is_on_host
from axrt.device.queues import NOW, DeviceStream, Moment, current_stream

from .envelope import is_large, pack
from .payload import flatten
from .transport import Parcel
from .wire import Layout


class Leaving(NamedTuple):
    """A parcel on its way out."""

    head: bytes  # header and description, see `envelope.pack`
    tensors: list[Tensor]  # rows of elements that MPI may read once the moment has passed
    # what must live, and may not be written to, until then or longer: the sender's own tensors,
    # and what they were laid out anew in
    lent: list[Tensor]
    ready: Moment  # moment at which the rows are there


class Staging(Protocol):
    """Moves the tensors of a parcel between the device that computes and the memory that MPI may
    touch."""

    def allocate(self, layout: Layout) -> Tensor:
        """Memory for a tensor that will arrive, as `Layout.allocate` gives it; MPI may write to it
        at once."""
        ...

    def outgoing(self, parcel: Parcel, after: Moment) -> Leaving:
        """Prepare a parcel whose tensors are there after a moment."""
        ...

    def incoming(
        self, tensors: Sequence[Tensor], layouts: Sequence[Layout]
    ) -> tuple[list[Tensor], Moment]:
        """Tensors that tasks may use once the moment has passed, made of those that came."""
        ...


class InPlace:
    """Tensors are in CPU memory."""

    def allocate(self, layout: Layout) -> Tensor:
        return layout.allocate(CPU)

    def outgoing(self, parcel: Parcel, after: Moment) -> Leaving:
        head, tensors = pack(parcel)
        return Leaving(head, tensors, tensors, NOW)

    def incoming(
        self, tensors: Sequence[Tensor], layouts: Sequence[Layout]
    ) -> tuple[list[Tensor], Moment]:
        return list(tensors), NOW


class PinnedMemory:
    """Pinned CPU memory that is used again for tensors of the same number of bytes.

    It is taken as a tensor, and comes back when nobody holds that tensor any more. What lies free
    is at most as much as was taken at once; beyond that, what has lain longest is given up.
    """

    def __init__(self) -> None:
        self._free: deque[Tensor] = deque()  # the one that came back last is last
        self._free_bytes = self._taken_bytes = self._most_bytes = 0

    def take(self, num_bytes: int, shaped: Callable[[Tensor], Tensor]) -> Tensor:
        """Memory of so many bytes, as the tensor that a function makes of a row of uint8."""
        row = self._found(num_bytes)
        if row is None:
            row = torch.empty(num_bytes, dtype=torch.uint8, device=CPU, pin_memory=True)
        self._taken_bytes += num_bytes
        self._most_bytes = max(self._most_bytes, self._taken_bytes)
        taken = shaped(row)
        weakref.finalize(taken, self._came_back, row).atexit = False
        return taken

    def _found(self, num_bytes: int) -> Tensor | None:
        for place in range(len(self._free) - 1, -1, -1):
            if self._free[place].nbytes == num_bytes:
                row = self._free[place]
                del self._free[place]
                self._free_bytes -= num_bytes
                return row
        return None

    def _came_back(self, row: Tensor) -> None:
        self._taken_bytes -= row.nbytes
        self._free.append(row)
        self._free_bytes += row.nbytes
        while self._free_bytes > self._most_bytes:
            self._free_bytes -= self._free.popleft().nbytes


class Pinned:
    """Moves tensors between a device and pinned CPU memory, asynchronously.

    Args:
        device: device that computes; its stream is the current one when `incoming` is called.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._in = DeviceStream(device), DeviceStream(device)
        self._pinned = PinnedMemory()

    def allocate(self, layout: Layout) -> Tensor:
        if layout.spec.on_host:
            return layout.allocate(CPU)
        return self._pinned.take(layout.num_bytes, layout.shaped)

    def outgoing(self, parcel: Parcel, after: Moment) -> Leaving:
        self._out.after(after)
        (head, tensors, rows), ready = self._out.launch(lambda: self._packed(parcel))
        _, sources = flatten(parcel.payload)
        # Also what MPI reads on the device: it may have been laid out anew just now.
        on_host = all(map(is_on_host, sources))
        return Leaving(head, rows, [*sources, *tensors], NOW if on_host else ready)

    def _packed(self, parcel: Parcel) -> tuple[bytes, list[Tensor], list[Tensor]]:
        head, tensors = pack(parcel)
        return head, tensors, [self._row_of(tensor) for tensor in tensors]

    def _row_of(self, tensor: Tensor) -> Tensor:
        """A copy in pinned memory; what leaves keeps the source until the copy is made."""
        if is_on_host(tensor):
            return tensor
        row = self._pinned.take(tensor.nbytes, lambda memory: memory.view(tensor.dtype))
        return row.copy_(tensor.as_strided((tensor.numel(),), (1,)), non_blocking=True)

    def incoming(
        self, tensors: Sequence[Tensor], layouts: Sequence[Layout]
    ) -> tuple[list[Tensor], Moment]:
        placed, moment = self._in.launch(
            lambda: [
                tensor if layout.spec.on_host else self._placed(tensor)
                for tensor, layout in zip(tensors, layouts, strict=True)
            ]
        )
        on_device = [tensor for tensor in placed if not is_on_host(tensor)]
        for tensor in on_device:
            tensor.record_stream(current_stream(self._device))
        return placed, _Kept(moment, tensors) if on_device else NOW

    def _placed(self, tensor: Tensor) -> Tensor:
        """A copy on the device, in memory of the queue's own: nothing that still runs elsewhere has
        it."""
        if not is_on_host(tensor):
            return tensor
        return tensor.to(self._device, non_blocking=True)


class Direct(Pinned):
    """MPI touches large tensors on the device itself; small ones come in their envelope."""

    def allocate(self, layout: Layout) -> Tensor:
        if layout.spec.on_host or not is_large(layout.num_bytes):
            return super().allocate(layout)
        # Memory that was freed on the stream that computes may still be read there, and MPI would
        # not wait for that: so it is the queue's own.
        buffer, _ = self._in.launch(lambda: layout.allocate(self._device))
        if torch.are_deterministic_algorithms_enabled():
            self._in.drain()  # they fill memory that is allocated
        return buffer

    def _row_of(self, tensor: Tensor) -> Tensor:
        return tensor if is_large(tensor.nbytes) else super()._row_of(tensor)


class _Kept:
    """A moment that keeps what is read before it."""

    __slots__ = ("_kept", "_moment")

    def __init__(self, moment: Moment, kept: Sequence[Tensor]) -> None:
        self._moment, self._kept = moment, kept

    def passed(self) -> bool:
        return self._moment.passed()


def staging_for(device: torch.device, device_aware: bool) -> Staging:
    """The staging of a rank that computes on this device."""
    if device == CPU:
        return InPlace()
    return Direct(device) if device_aware else Pinned(device)
