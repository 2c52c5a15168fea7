"""Latency and bandwidth between neighbouring ranks, by raw MPI."""

import statistics
import time
from typing import Any, NamedTuple

import numpy as np

_SMALL_BYTES, _LARGE_BYTES = 1024, 16 * 2**20
_PINGS, _TRANSFERS = 200, 8


class Link(NamedTuple):
    """The measured link from one rank to another."""

    # source, target: ranks of the two ends
    source: int
    target: int
    latency_us: float  # median time of a message of 1 KiB, one way, in microseconds
    gb_per_s: float  # median rate of messages of 16 MiB, one way, in 1e9 bytes a second


def measure(comm: Any) -> list[Link]:
    """Measure the link from each rank to the next, one pair after the other; every rank calls it.

    Returns:
        All links on rank 0; on other ranks [].
    """
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
    """Median time of one way of a ping-pong, in seconds; the first two round trips warm up."""
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
