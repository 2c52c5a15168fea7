"""Measures copies between a device and a tier, in both directions at once."""

import time
from collections.abc import Callable, Sequence

import torch

from axrt.device import CPU
from axrt.offload.memory import aligned
from axrt.offload.tier import Tier
from axrt.queues import DeviceStream, Moment, Queue, moment_of, wait_for
from axrt.thread_queue import ThreadQueue

_SMALL_BYTES, _LARGE_BYTES = 2**18, 2**24
_SLOW_S = 0.01  # in which a small copy tells the rate
_LEAST_S = 0.1  # of a measurement
_MOST_TIMES = 64


def copied_a_second(tier: Tier, device: torch.device) -> tuple[float, float]:
    """Bytes a second to the device and from it, both at once, on this rank; others may measure at
    the same time. It takes less than half a second, and longer where a tier has less than 3 MB/s.

    Args:
        tier: tier, from which four stretches are cut.
        device: device that layers compute on.
    """
    holds_up = device == CPU or tier.is_disk
    queues: list[Queue] = (
        [ThreadQueue("axrt rates", device), ThreadQueue("axrt rates", device)]
        if holds_up
        else [DeviceStream(device), DeviceStream(device)]
    )
    small = _moves(tier, device, _SMALL_BYTES)
    took = _both_s(queues, small, 1)
    if max(took) > _SLOW_S:
        return _SMALL_BYTES / took[0], _SMALL_BYTES / took[1]
    large = _moves(tier, device, _LARGE_BYTES)
    times = max(1, min(_MOST_TIMES, int(_LEAST_S / max(_both_s(queues, large, 1)))))
    into, out = _both_s(queues, large, times)
    return times * _LARGE_BYTES / into, times * _LARGE_BYTES / out


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
    return took[0], took[1]
