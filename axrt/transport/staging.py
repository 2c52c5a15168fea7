"""Where a tensor's bytes are while MPI reads or writes them.

MPI touches memory from the CPU, and a GPU's memory only where the library is CUDA-aware. So what travels
is *staged*: used where it is (`Direct`), or copied through pinned CPU memory on a stream of its own
(`Pinned`), so that neither the loop nor the computation waits for the copy. A staged tensor says when it is ready.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

Ready = Callable[[], bool]


def at_once() -> bool:
    """Nothing to wait for."""
    return True


class Staging(Protocol):
    """Moves tensors between the device that computes and the memory that MPI may touch."""

    @property
    def memory(self) -> torch.device:
        """Where MPI may write what arrives."""
        ...

    def outgoing(self, tensor: Tensor) -> tuple[Tensor, Ready]:
        """What MPI may read once it is ready; the caller keeps the tensor until then."""
        ...

    def incoming(self, tensor: Tensor) -> tuple[Tensor, Ready]:
        """What the computation may use once it is ready, made of what MPI wrote."""
        ...


class Direct:
    """MPI touches the tensors where they are: CPU memory, or a GPU's under a CUDA-aware library."""

    def __init__(self, device: torch.device) -> None:
        self.memory = device

    def outgoing(self, tensor: Tensor) -> tuple[Tensor, Ready]:
        if not tensor.is_cuda:
            return tensor, at_once
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()  # it may have been laid out anew on the stream just now
        return tensor, event.query

    def incoming(self, tensor: Tensor) -> tuple[Tensor, Ready]:
        return tensor if tensor.device == self.memory else tensor.to(self.memory), at_once


class Pinned:
    """Through pinned CPU memory, asynchronously.

    Called while the stream that computes is the current one: what goes out may have been laid out anew there just now, and what
    comes in will be used there.
    """

    def __init__(self, device: torch.device) -> None:
        self.memory = torch.device("cpu")
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def outgoing(self, tensor: Tensor) -> tuple[Tensor, Ready]:
        self._stream.wait_stream(torch.cuda.current_stream())
        return self._copy(tensor, torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True))

    def incoming(self, tensor: Tensor) -> tuple[Tensor, Ready]:
        pinned = tensor.pin_memory()
        with torch.cuda.stream(self._stream):  # memory of this stream's: nothing that still runs elsewhere has it
            target = torch.empty_like(pinned, device=self._device, pin_memory=False)
        target.record_stream(torch.cuda.current_stream())
        return self._copy(pinned, target)

    def _copy(self, source: Tensor, target: Tensor) -> tuple[Tensor, Ready]:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        if source.is_cuda:
            source.record_stream(self._stream)  # its memory may be handed out again only when this copy is done
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)

        def ready() -> bool:
            return bool(event.query()) and source is not None  # type: ignore[no-untyped-call]

        return target, ready


def staging_for(device: torch.device, cuda_aware: bool) -> Staging:
    """The staging of a rank that computes on this device."""
    return Pinned(device) if device.type == "cuda" and not cuda_aware else Direct(device)
