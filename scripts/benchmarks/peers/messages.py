"""The mpi transport beside raw mpi4py: latency, bandwidth, and what a large message waits for a
busy sender."""

import statistics
import time
from collections.abc import Callable
from math import inf
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from axrt.device.allocator import keep_freed_memory
from axrt.scheduler.message import Meaning, Message
from axrt.transport import Parcel
from axrt.transport.mpi import MpiTransport

KIB, MIB = 2**10, 2**20
SIZES = (KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
BUSY_S = 0.05


def run(rounds: int) -> list[dict[str, Any]]:
    """A row a size and round, on rank 0; both ranks call it."""
    keep_freed_memory()
    world = MPI.COMM_WORLD
    transport, raw = MpiTransport(world), world.Dup()
    rows = []
    for number in range(rounds + 1):
        for size in SIZES:
            turns = max(4, min(200, 64 * MIB // size))
            row: dict[str, Any] = {"part": "messages", "bytes": size, "round": number}
            row |= _beside(_Raw(raw, size, turns), turns, "raw") | _beside(
                _Ours(transport, world.rank, size), turns, "axrt"
            )
            row["waits_ms"] = 1e3 * _waits_s(transport, world, size)
            rows.append(row)
    transport.close()
    return [row for row in rows if row["round"]] if world.rank == 0 else []


def _beside(side: "_Raw | _Ours", turns: int, name: str) -> dict[str, float]:
    latencies = [_timed(lambda: side.there_and_back()) / 2 for _ in range(turns)]
    stream_s = _timed(lambda: side.stream(turns))
    return {
        f"{name}_us": 1e6 * statistics.median(latencies),
        f"{name}_gb_s": side.size * turns / stream_s / 1e9,
    }


def _timed(run: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    run()
    return time.perf_counter() - began_s


class _Raw:
    """Blocking calls on buffers that stay, one a message of the stream, as a step of training keeps
    what arrives."""

    def __init__(self, comm: MPI.Comm, size: int, turns: int) -> None:
        self.comm, self.size = comm, size
        self.rows = [np.ones(size, np.uint8) for _ in range(turns)]
        self.word = np.ones(1, np.uint8)

    def there_and_back(self) -> None:
        if self.comm.rank == 0:
            self.comm.Send(self.rows[0], 1)
            self.comm.Recv(self.rows[0], 1)
        else:
            self.comm.Recv(self.rows[0], 0)
            self.comm.Send(self.rows[0], 0)

    def stream(self, count: int) -> None:
        if self.comm.rank == 0:
            MPI.Request.Waitall([self.comm.Isend(self.rows[0], 1) for _ in range(count)])
            self.comm.Recv(self.word, 1)
        else:
            MPI.Request.Waitall([self.comm.Irecv(row, 0) for row in self.rows])
            self.comm.Send(self.word, 0)


class _Ours:
    """Parcels, each into memory of its own. Neither side sleeps: this is a rank that has work, not
    one that waits."""

    def __init__(self, transport: MpiTransport, rank: int, size: int) -> None:
        self.transport, self.rank, self.size = transport, rank, size
        self.value = torch.ones(size // 4)

    def there_and_back(self) -> None:
        if self.rank == 0:
            self._send(self.value)
            self._hear(1)
        else:
            self._hear(1)
            self._send(self.value)

    def stream(self, count: int) -> None:
        if self.rank == 0:
            for _ in range(count):
                self._send(self.value)
            self._hear(1)
        else:
            self._hear(count)
            self._send(self.value[:1])

    def _send(self, value: torch.Tensor) -> None:
        self.transport.send(1 - self.rank, Parcel(0, Message(Meaning.ACTIVATION, 0, 0), value))

    def _hear(self, count: int) -> None:
        while count:
            count -= len(self.transport.poll(wait_s=0))


def _waits_s(transport: MpiTransport, world: MPI.Comm, size: int) -> float:
    """From sending to hearing, while the sender is in a task of 50 ms right after."""
    value = torch.ones(size // 4)
    world.Barrier()
    heard_s = sent_s = 0.0
    if world.rank == 0:
        sent_s = time.perf_counter()
        transport.send(1, Parcel(0, Message(Meaning.ACTIVATION, 0, 0), value))
        time.sleep(BUSY_S)
    else:
        while not transport.poll(wait_s=inf):
            pass
        heard_s = time.perf_counter()
    return world.allreduce(heard_s) - world.allreduce(sent_s)  # type: ignore[no-any-return]
