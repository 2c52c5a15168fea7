"""Messages that take their time, for every runtime alike.

The layer that makes an activation, or its gradient, writes the moment into the first element. Torch
and DeepSpeed wait for a message before they call the layer that needs it, so there the layer waits
until the message would have come. axrt goes on with other tasks meanwhile, so there the transport
holds it back.
"""

import time
from typing import Any

from mpi4py import MPI
from torch import Tensor

from axrt.transport import Parcel
from axrt.transport.mpi import MpiTransport

_ROUND_S = 64.0  # float32 tells microseconds below that


def stamped(value: Tensor) -> Tensor:
    """A copy that says when it was made."""
    copy = value.clone()
    copy.view(-1)[0] = time.perf_counter() % _ROUND_S
    return copy


def left_s(value: Tensor, delay_s: float) -> float:
    """Seconds until a message with this value, which ranks of this node have made, is there."""
    age_s = (time.perf_counter() - float(value.view(-1)[0])) % _ROUND_S
    return delay_s - (age_s if age_s < _ROUND_S / 2 else 0.0)


class LateTransport(MpiTransport):
    """Holds back activations and gradients.

    Args:
        communicator: of the job.
        delay_s: seconds that a message is under way.
    """

    def __init__(self, communicator: MPI.Comm, delay_s: float) -> None:
        super().__init__(communicator)
        self._delay_s = delay_s
        self._late: list[tuple[float, int, Parcel]] = []

    def poll(self, wait_s: float) -> list[tuple[int, Parcel]]:
        first_s = min((due for due, *_ in self._late), default=float("inf")) - time.perf_counter()
        for source, parcel in super().poll(max(0.0, min(wait_s, first_s))):
            left = left_s(parcel.payload, self._delay_s) if _is_value(parcel.payload) else 0.0
            self._late.append((time.perf_counter() + left, source, parcel))
        now = time.perf_counter()
        ready = [(source, parcel) for due, source, parcel in self._late if due <= now]
        self._late = [one for one in self._late if one[0] > now]
        return ready

    @property
    def receiving(self) -> bool:
        return super().receiving or bool(self._late)


def _is_value(payload: Any) -> bool:
    return isinstance(payload, Tensor) and payload.dim() > 1
