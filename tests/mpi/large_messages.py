"""A rank that sends tensors to the other one and then computes for a second without a call of MPI:
one of 4 MiB, then a large envelope of small ones, and then a hundred. Says what raw mpi4py and axrt
say of single copy, whether all came meanwhile, and how often the thread of the sender looked after
the first."""

import json
import time
from collections.abc import Sequence

import torch
from mpi4py import MPI

from axrt.scheduler.message import Meaning, Message
from axrt.transport import Parcel
from axrt.transport.mpi import MpiTransport

COMPUTES_S = 0.6  # a message takes a hundredth of it
# Sizes of the tensors of each parcel.
ONE = [(1 << 20,)]
WITHIN_THE_ENVELOPE = [(7_001,) * 40]  # none as large as to travel beside it
MANY = [(12_000,)] * 99 + ONE  # more than MPI's queues have room for


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


def came_meanwhile(
    comm: MPI.Comm, transport: MpiTransport, parcels: Sequence[Sequence[int]]
) -> bool:
    comm.Barrier()
    if comm.rank == 0:
        for number, sizes in enumerate(parcels):
            sent = tuple(torch.full((size,), float(number)) for size in sizes)
            transport.send(1, Parcel(0, Message(Meaning.ACTIVATION, 1, number), sent))
        ended_s = computes(COMPUTES_S)
        while transport._sending:
            transport.poll(0)
        comm.send(ended_s, 1)
        return bool(comm.recv(source=1))
    time.sleep(COMPUTES_S / 5)
    arrived: list[tuple[int, Parcel]] = []
    while len(arrived) < len(parcels):
        arrived += transport.poll(0.01)
    there_s = time.monotonic()
    for _, (_, message, payload) in arrived:
        for size, tensor in zip(parcels[message.number], payload, strict=True):
            assert torch.equal(tensor, torch.full((size,), float(message.number)))
    came = there_s < comm.recv(source=0)
    comm.send(came, 0)
    return bool(came)


def main() -> None:
    comm = MPI.COMM_WORLD.Dup()
    raw, transport, looks = comes_alone(comm), MpiTransport(comm), 0
    assert transport._progress is not None
    look = transport._progress._look

    def counted() -> None:
        nonlocal looks
        looks += 1
        look()

    transport._progress._look = counted
    came, of_one = came_meanwhile(comm, transport, ONE), looks
    for parcels in (WITHIN_THE_ENVELOPE, MANY):
        came = came_meanwhile(comm, transport, parcels) and came
    transport.close()
    if comm.rank == 0:
        ours = bool(transport._single_copy_peers)
        print(json.dumps({"raw": raw, "ours": ours, "came": came, "looks": of_one}))
