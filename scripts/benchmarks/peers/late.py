"""Messages that take their time, for every runtime alike.

The first element of an activation, or of its gradient, says when it was sent: the transport writes
it under axrt, `stamp_sends` under torch, and the layer itself under DeepSpeed. Torch and DeepSpeed
wait for a message before they call the layer that needs it, so there the layer waits until the
message would have come. axrt goes on with other tasks meanwhile, so there the transport holds it
back.
"""

import time

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

from axrt.payload import flatten
from axrt.queues import NOW, Moment
from axrt.scheduler.message import Meaning
from axrt.transport import Parcel
from axrt.transport.mpi import MpiTransport

_ROUND_S = 64.0  # float32 tells microseconds below that


@torch.no_grad()
def stamp(value: Tensor) -> None:
    """Write the moment into a tensor."""
    value.view(-1)[0] = time.perf_counter() % _ROUND_S


def stamped(value: Tensor) -> Tensor:
    """A copy that says when it was made."""
    copy = value.clone()
    stamp(copy)
    return copy


def stamp_sends() -> None:
    """Let torch's pipelines say when they send, in this process."""
    issue = dist.batch_isend_irecv

    def issued(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
        for one in p2p_op_list:
            if one.op is dist.isend:
                stamp(one.tensor)
        return issue(p2p_op_list)

    dist.batch_isend_irecv = issued


def left_s(value: Tensor, delay_s: float) -> float:
    """Seconds until a message with this value, which ranks of this node have made, is there."""
    age_s = (time.perf_counter() - float(value.view(-1)[0])) % _ROUND_S
    return delay_s - (age_s if age_s < _ROUND_S / 2 else 0.0)


class LateTransport(MpiTransport):
    """Holds back activations and gradients of other ranks.

    Args:
        communicator: of the job.
        delay_s: seconds that a message is under way.
    """

    def __init__(self, communicator: MPI.Comm, delay_s: float) -> None:
        super().__init__(communicator)
        self._delay_s = delay_s
        self._late: list[tuple[float, int, Parcel]] = []

    def send(self, rank: int, parcel: Parcel, after: Moment = NOW) -> None:
        if (value := value_of(parcel)) is not None and rank != self.rank:
            stamp(value)
        super().send(rank, parcel, after)

    def poll(self, wait_s: float) -> list[tuple[int, Parcel]]:
        first_s = min((due for due, *_ in self._late), default=float("inf")) - time.perf_counter()
        for source, parcel in super().poll(max(0.0, min(wait_s, first_s))):
            value = None if source == self.rank else value_of(parcel)  # within a rank it is there
            left = 0.0 if value is None else left_s(value, self._delay_s)
            self._late.append((time.perf_counter() + left, source, parcel))
        now = time.perf_counter()
        ready = [(source, parcel) for due, source, parcel in self._late if due <= now]
        self._late = [one for one in self._late if one[0] > now]
        return ready

    @property
    def receiving(self) -> bool:
        return super().receiving or bool(self._late)


def value_of(parcel: Parcel) -> Tensor | None:
    """The first tensor of an activation, or of its gradient; None of anything else."""
    meaning = getattr(parcel.message, "meaning", None)
    is_value = meaning in (Meaning.ACTIVATION, Meaning.GRADIENT)
    values = flatten(parcel.payload)[1] if is_value else []
    return values[0] if values else None
