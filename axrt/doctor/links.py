"""Latency and bandwidth between neighbouring ranks, by raw MPI."""

import statistics
import time
from typing import Any, NamedTuple

import numpy as np

_SMALL_BYTES, _LARGE_BYTES = 1024, 16 * 2**20
_PINGS, _TRANSFERS = 200, 8


class Link(NamedTuple):
    """From one rank to another.

    Args:
        source, target: ranks.
        latency_us: of a message of 1 KiB, one way, median.
        gb_per_s: of messages of 16 MiB, one way, median; 1e9 bytes.
    """

    source: int
    target: int
    latency_us: float
    gb_per_s: float


def measure(comm: Any) -> list[Link]:
    """Each rank with the next, one pair after the other; every rank calls it and rank 0 gets them
    all."""
    links = []
    for source in range(comm.size - 1):
        comm.Barrier()
        if comm.rank in (source, source + 1):
            peer = 2 * source + 1 - comm.rank
            latency_s = _ping_s(comm, peer, comm.rank == source, _SMALL_BYTES, _PINGS)
            large_s = _ping_s(comm, peer, comm.rank == source, _LARGE_BYTES, _TRANSFERS)
            links.append(Link(source, source + 1, latency_s * 1e6, _LARGE_BYTES / large_s / 1e9))
    gathered: list[list[Link]] | None = comm.gather(links)
    return sorted(
        {
            (link.source, link.target): link
            for of_rank in reversed(gathered or [])
            for link in of_rank
        }.values()
    )


def _ping_s(comm: Any, peer: int, first: bool, size: int, times: int) -> float:
    """Seconds for one way of a ping-pong, the median; the first ones warm up."""
    data = np.ones(size, np.uint8)  # touched: fresh pages would be measured along
    taken = []
    for _ in range(times + 2):
        began = time.perf_counter()
        if first:
            comm.Send(data, peer)
            comm.Recv(data, peer)
        else:
            comm.Recv(data, peer)
            comm.Send(data, peer)
        taken.append((time.perf_counter() - began) / 2)
    return statistics.median(taken[2:])
