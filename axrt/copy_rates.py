"""Measures copies between a device and a tier, in both directions at once."""

import time
from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

import torch

from axrt.device import CPU
from axrt.offload.arena import PAGE_BYTES
from axrt.offload.memory import aligned
from axrt.offload.tier import Tier
from axrt.queues import LOOK_S, DeviceStream, Inline, Moment, Queue, moment_of, wait_for
from axrt.thread_queue import ThreadQueue

_LEAST_BYTES, _MOST_BYTES = 2**18, 2**24
_TRIES = 3  # small copies, of which the fastest counts
_COPY_S, _LEAST_S = 0.05, 0.1  # of a copy that is measured, and of all of them
_MOST_TIMES = 64


class Copies(NamedTuple):
    """Bytes a second between a rank's device and scratch, both directions at once."""

    into: float = inf
    out: float = inf


def copied_a_second(tier: Tier, device: torch.device, apart: bool) -> Copies:
    """Measure on this rank, while others may do the same. It takes less than half a second where a
    tier has 5 MB/s or more.

    Args:
        tier: tier, from which four stretches are cut, 33 MB at most.
        device: device that layers compute on.
        apart: True where copies have threads of their own, as they hold up who calls.
    """
    queues: list[Queue] = [_queue(device, apart), _queue(device, apart)]
    small = _moves(tier, device, _LEAST_BYTES)
    _both_s(queues, small, 1)  # the first one wakes threads and takes memory
    took = min(max(_both_s(queues, small, 1)) for _ in range(_TRIES))
    size = min(_MOST_BYTES, max(_LEAST_BYTES, int(_COPY_S / took * _LEAST_BYTES)))
    size -= size % PAGE_BYTES
    moves = _moves(tier, device, size)
    times = max(1, min(_MOST_TIMES, int(_LEAST_S / max(_both_s(queues, moves, 1)))))
    into, out = _both_s(queues, moves, times)
    return Copies(times * size / into, times * size / out)


def _queue(device: torch.device, apart: bool) -> Queue:
    if apart:
        return ThreadQueue("axrt rates", device)
    return Inline() if device == CPU else DeviceStream(device)


def _moves(tier: Tier, device: torch.device, num_bytes: int) -> list[Callable[[], None]]:
    """A copy to the device, and one from it."""
    stretches = [tier.cut(num_bytes, "a copy that is timed") for _ in range(2)]
    there = [aligned(num_bytes, device) for _ in range(2)]
    wait_for(moment_of(there))
    tier.write(stretches[0], there[0])  # only what was written can be read
    wait_for(moment_of(there))
    return [
        lambda: tier.read(stretches[0], there[0]),
        lambda: tier.write(stretches[1], there[1]),
    ]


def _both_s(
    queues: Sequence[Queue], moves: Sequence[Callable[[], None]], times: int
) -> tuple[float, float]:
    """The seconds until each queue has made its move so many times, while the other does."""
    began = time.perf_counter()
    ends: list[Moment] = []
    for _ in range(times):
        ends = [queue.put(move) for queue, move in zip(queues, moves, strict=True)]
    took = [0.0, 0.0]
    while not all(took):
        for place, end in enumerate(ends):
            if not took[place] and end.passed():
                took[place] = max(1e-9, time.perf_counter() - began)
        time.sleep(LOOK_S)  # or the threads would wait for the interpreter
    return took[0], took[1]
