"""Messages that take their time, for every runtime alike.

The first element of an activation, or of its gradient, says when it was sent. It is written where a
runtime sends and read where it waits for the message: in axrt's transport, around the sends and
receives of torch's schedules, and around those of DeepSpeed's engine. So what a runtime does with a
message that has come follows the wait, as it would on a slow link.
"""

import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor
from torch.distributed.pipelining import schedules

from axrt.device.queues import NOW, Moment
from axrt.scheduler.message import Meaning
from axrt.transport import Parcel
from axrt.transport.mpi import MpiTransport
from axrt.transport.payload import flatten

_ROUND_S = 64.0  # float32 tells microseconds below that


@torch.no_grad()
def stamp(value: Tensor) -> None:
    """Write the moment into a tensor."""
    value.view(-1)[0] = time.perf_counter() % _ROUND_S


@torch.no_grad()
def left_s(value: Tensor, delay_s: float) -> float:
    """Seconds until a message with this value, which ranks of this node have made, is there."""
    age_s = (time.perf_counter() - float(value.view(-1)[0])) % _ROUND_S
    return max(0.0, delay_s - (age_s if age_s < _ROUND_S / 2 else 0.0))


class LateWork(NamedTuple):
    """A receive of torch's that takes its time.

    Args:
        work: the receive.
        value: what it fills.
        delay_s: seconds that a message is under way.
    """

    work: dist.Work
    value: Tensor
    delay_s: float

    def wait(self) -> None:
        self.work.wait()
        time.sleep(left_s(self.value, self.delay_s))


def delay_torch(delay_s: float) -> None:
    """From now on messages of torch's schedules take so long, in this process."""
    issue = schedules._batch_p2p

    def issued(p2p_ops: list[dist.P2POp], *args: Any, **named: Any) -> list[Any]:
        for one in p2p_ops:
            if one.op is dist.isend:
                stamp(one.tensor)
        works = issue(p2p_ops, *args, **named)
        return [
            LateWork(work, one.tensor, delay_s) if one.op is dist.irecv else work
            for one, work in zip(p2p_ops, works, strict=True)
        ]

    schedules._batch_p2p = issued


def delay_deepspeed(delay_s: float) -> None:
    """From now on activations and gradients of DeepSpeed's pipeline take so long, in this
    process."""
    from deepspeed.runtime.pipe import p2p

    send, recv = p2p.send, p2p.recv

    def sent(tensor: Tensor, *args: Any, **named: Any) -> None:
        if _is_value(tensor):
            stamp(tensor)
        send(tensor, *args, **named)

    def received(tensor: Tensor, *args: Any, **named: Any) -> None:
        recv(tensor, *args, **named)
        if _is_value(tensor):
            time.sleep(left_s(tensor, delay_s))

    p2p.send, p2p.recv = sent, received


def _is_value(tensor: Tensor) -> bool:
    """Shapes and types travel as whole numbers."""
    return tensor.is_floating_point() and tensor.dim() > 0


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
