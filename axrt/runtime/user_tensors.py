"""What passes between the user and the tasks: his batches become tensors on the device, and results
of ours become his."""

# Memory of a device belongs to the stream that it was allocated on, which may give it away as soon
# as nobody holds it. So the stream that computes is recorded on what arrives and on the user's own
# batches, and the user's stream on what he is given. Pinned memory is kept by its number of bytes,
# and comes back when nobody holds it. What was on the sender's host arrives on the host: norms,
# targets.

from typing import Any

import torch
from torch import Tensor

from axrt.device.device import CPU, is_on_host
from axrt.device.queues import DeviceStream, current_stream
from axrt.transport.payload import flatten, on, unflatten

from .compute import Compute


class UserTensors:
    """The border of one rank."""

    def __init__(self, device: torch.device, compute: Compute) -> None:
        self._device, self._compute = device, compute
        self._in = None if device == CPU else DeviceStream(device)

    def taken(self, payload: Any) -> Any:
        """The user's payload with its tensors on the device, for tasks that start from now on.

        Copies run on a queue of their own: behind no task that is running.
        """
        if self._in is None:
            is_there = isinstance(payload, Tensor) and payload.is_cpu  # as nearly always
            return payload if is_there else on(CPU, payload)
        skeleton, tensors = flatten(payload)
        placed, moment = self._in.launch(lambda: [self._placed(tensor) for tensor in tensors])
        self._compute.queue.after(moment)
        with self._compute.current():
            _record(placed)
        return unflatten(skeleton, placed)

    def given(self, payload: Any) -> Any:
        """A payload of ours, for the user's own stream, which is the current one."""
        if self._in is not None:
            _record(flatten(payload)[1])
        return payload

    def _placed(self, tensor: Tensor) -> Tensor:
        if is_on_host(tensor) and not tensor.is_pinned():
            # As `to` would lay it out: rows that were expanded are repeated.
            pinned = torch.empty_like(tensor, pin_memory=True, requires_grad=False)
            tensor = pinned.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)
        return tensor.to(self._device, non_blocking=True)


def _record(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        if not is_on_host(tensor):
            tensor.record_stream(current_stream(tensor.device))
