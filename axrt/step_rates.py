"""Measures what an optimizer step takes beside a host: copies in both directions at once, and the
optimizer on the device and on the host. It takes less than a second."""

import time
from typing import NamedTuple

import torch
from torch import nn

from axrt.copy_rates import copied_a_second
from axrt.device import CPU
from axrt.offload.tier import HostTier
from axrt.queues import moment_of, wait_for
from axrt.store.bucket import OptimizerFactory
from axrt.store.probe import made_by

_SHAPE = (1024, 1024)
_LEAST_S = 0.1  # of a measurement
_MOST_TIMES = 64


class StepRates(NamedTuple):
    """What was measured.

    Args:
        copies_in, copies_out: bytes a second to the device and from it, both at once.
        on_device, on_host: parameters a second that the optimizer steps there.
    """

    copies_in: float
    copies_out: float
    on_device: float
    on_host: float


def measured(factory: OptimizerFactory, device: torch.device) -> StepRates:
    """Measure on this rank, while others may do the same.

    Args:
        factory: function that makes the optimizer of a bucket.
        device: device that layers compute on.
    Raises:
        Exception: whatever the user's factory or optimizer raises on a float32 parameter of two
            dimensions named "0.weight".
    """
    on_host = _stepped_a_second(factory, CPU)
    on_device = on_host if device == CPU else _stepped_a_second(factory, device)
    tier = HostTier(device)
    copies = copied_a_second(tier, device, apart=device == CPU)
    tier.close()
    return StepRates(*copies, on_device, on_host)


def _stepped_a_second(factory: OptimizerFactory, device: torch.device) -> float:
    parameter = nn.Parameter(torch.zeros(_SHAPE, device=device))
    optimizer = made_by(factory, [("0.weight", parameter)])
    assert optimizer is not None

    def step_s(times: int) -> float:
        began = time.perf_counter()
        for _ in range(times):
            parameter.grad = gradient
            optimizer.step()
        wait_for(moment_of([parameter.detach()]))
        return max(1e-9, time.perf_counter() - began)

    gradient = torch.full(_SHAPE, 1e-3, device=device)
    step_s(1)  # which makes the moments
    times = max(1, min(_MOST_TIMES, int(_LEAST_S / step_s(1))))
    return times * parameter.numel() / step_s(times)
