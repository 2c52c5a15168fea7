"""A rank that computes for a second after it has sent 4 MiB to the other one, without a call of
MPI; what raw mpi4py and axrt say of single copy, when the message was there, and who looked."""

import json
import threading
import time

import torch
from mpi4py import MPI

from axrt.scheduler.message import Meaning, Message
from axrt.transport import Parcel
from axrt.transport.mpi import MpiTransport
from axrt.transport.single_copy import ranks_that_take_alone

COMPUTES_S = 1.0


def comes_alone(comm: MPI.Comm) -> bool:
    """By raw MPI: 4 MiB are there before the sender, which sleeps, makes another call."""
    memory = bytearray(1 << 22)
    comm.Barrier()
    if comm.rank == 0:
        request = comm.Isend([memory, MPI.BYTE], 1)
        time.sleep(COMPUTES_S)
        silent_until_s = time.monotonic()
        request.Wait()
        comm.send(silent_until_s, 1)
        return bool(comm.recv(source=1))
    comm.Recv([memory, MPI.BYTE], 0)
    there_s = time.monotonic()
    alone = there_s < comm.recv(source=0)
    comm.send(alone, 0)
    return bool(alone)


def computes(seconds: float) -> float:
    """Compute for so long; the time at which it ends."""
    until_s, value = time.monotonic() + seconds, torch.ones(100, 100)
    while time.monotonic() < until_s:
        value = value @ value / 100
    return time.monotonic()


def came_meanwhile(comm: MPI.Comm, transport: MpiTransport) -> bool:
    sent = torch.arange(float(1 << 20))
    comm.Barrier()
    if comm.rank == 0:
        transport.send(1, Parcel(0, Message(Meaning.ACTIVATION, 1, 0), sent))
        ended_s = computes(COMPUTES_S)
        transport.poll(0)
        comm.send(ended_s, 1)
        return bool(comm.recv(source=1))
    arrived: list[tuple[int, Parcel]] = []
    while not arrived:
        arrived = transport.poll(0.01)
    there_s = time.monotonic()
    assert torch.equal(arrived[0][1].payload, sent)
    came = there_s < comm.recv(source=0)
    comm.send(came, 0)
    return bool(came)


def main() -> None:
    comm = MPI.COMM_WORLD
    raw, ours = comes_alone(comm), bool(ranks_that_take_alone(comm))
    transport = MpiTransport(comm)
    came = came_meanwhile(comm, transport)
    looked = any(thread.name == "axrt progress" for thread in threading.enumerate())
    transport.close()
    if comm.rank == 0:
        print(json.dumps({"raw": raw, "ours": ours, "came": came, "sender looked": looked}))


if __name__ == "__main__":
    main()
