"""Where a tensor's bytes are while MPI reads or writes them.

MPI touches memory from the CPU, and a GPU's memory only where the library is CUDA-aware. So tensors
that travel are *staged*: used where they are (`Direct`), or copied through pinned CPU memory on a
stream of its own (`Pinned`), so that neither the loop nor the computation waits for the copy. A
function beside staged tensors says when they are ready.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from .wire import Layout

Ready = Callable[[], bool]
Staged = tuple[list[Tensor], Ready | None]  # None: ready at once


class Staging(Protocol):
    """Moves the tensors of a parcel between the device that computes and the memory that MPI may
    touch."""

    def room_for(self, layout: Layout) -> Tensor:
        """Memory for a tensor that will arrive, as `Layout.allocate` gives it; MPI may write to it
        at once."""
        ...

    def outgoing(self, tensors: list[Tensor]) -> Staged:
        """Tensors that MPI may read once they are ready; the caller keeps the given ones until
        then."""
        ...

    def incoming(self, tensors: list[Tensor]) -> Staged:
        """Tensors that the computation may use once they are ready, made of those that MPI
        wrote."""
        ...


class Direct:
    """MPI touches the tensors where they are: CPU memory, or a GPU's under a CUDA-aware library."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def room_for(self, layout: Layout) -> Tensor:
        if self._stream is None:
            return layout.allocate(self._device)
        # Memory that was freed on the stream that computes may still be read there, and MPI would
        # not wait for that.
        with torch.cuda.stream(self._stream):
            room = layout.allocate(self._device)
        self._stream.synchronize()  # deterministic algorithms fill memory that is allocated
        room.record_stream(torch.cuda.current_stream())
        return room

    def outgoing(self, tensors: list[Tensor]) -> Staged:
        if self._stream is None or not any(tensor.is_cuda for tensor in tensors):
            return tensors, None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()  # they may have been laid out anew on the stream just now
        return tensors, event.query

    def incoming(self, tensors: list[Tensor]) -> Staged:
        if self._stream is None:
            return tensors, None
        return [
            tensor.to(self._device) for tensor in tensors
        ], None  # small ones come in their envelope


class Pinned:
    """Moves tensors through pinned CPU memory, asynchronously.

    It is called while the stream that computes is the current one: outgoing tensors may have been
    laid out anew there just now, and incoming ones will be used there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def room_for(self, layout: Layout) -> Tensor:
        return layout.allocate(torch.device("cpu"))

    def outgoing(self, tensors: list[Tensor]) -> Staged:
        if not tensors:
            return tensors, None
        self._stream.wait_stream(torch.cuda.current_stream())
        return self._copies(
            tensors,
            [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors],
        )

    def incoming(self, tensors: list[Tensor]) -> Staged:
        pinned = [tensor.pin_memory() for tensor in tensors]
        with torch.cuda.stream(
            self._stream
        ):  # memory of this stream's: nothing that still runs elsewhere has it
            targets = [
                torch.empty_like(tensor, device=self._device, pin_memory=False) for tensor in pinned
            ]
        for target in targets:
            target.record_stream(torch.cuda.current_stream())
        return self._copies(pinned, targets)

    def _copies(self, sources: list[Tensor], targets: list[Tensor]) -> Staged:
        with torch.cuda.stream(self._stream):
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
                if source.is_cuda:
                    # its memory may be handed out again only when this copy is done
                    source.record_stream(self._stream)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)

        def ready() -> bool:
            return bool(event.query()) and bool(sources)  # type: ignore[no-untyped-call]

        return targets, ready


def staging_for(device: torch.device, cuda_aware: bool) -> Staging | None:
    """The staging of a rank that computes on this device; None where tensors are in CPU memory
    anyway."""
    if device.type == "cpu":
        return None
    return Direct(device) if cuda_aware else Pinned(device)
