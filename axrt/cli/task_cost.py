"""What the event loop takes for a task, measured on the host: a step of a layer that computes next
to nothing, beside the same without a loop."""

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import nn
from torch.nn import functional

from axrt.engine import initialize
from axrt.model.module import PipelineModule
from axrt.transport.local import LocalWorld

_MICROBATCHES, _STEPS = 128, 5
_TASKS = 2 * _MICROBATCHES  # forwards, and backwards that are whole


def measured_task_s() -> float:
    """Seconds that the loop takes for a task, one rank alone, messages aside: the median of some
    steps. Their share of the optimizer's step is in it."""
    return max(0.0, (_with_the_loop() - _without()) / _TASKS)


def _with_the_loop() -> float:
    model = PipelineModule([nn.Linear(1, 1)], functional.mse_loss)
    schedule = {"policy": "1f1b", "microbatches": _MICROBATCHES}
    config = {"schedule": schedule, "run": {"device": "cpu"}}
    one = torch.ones(1, 1)
    with initialize(model, config=config, transport=LocalWorld(1).alone()) as engine:
        return _seconds_of(lambda: engine.train_batch(iter([(one, one)] * _MICROBATCHES)))


def _without() -> float:
    layer, one = nn.Linear(1, 1), torch.ones(1, 1)

    def step() -> None:
        for _ in range(_MICROBATCHES):
            torch.autograd.backward(functional.mse_loss(layer(one), one))

    return _seconds_of(step)


def _seconds_of(step: Callable[[], object]) -> float:
    took = []
    for _ in range(_STEPS + 1):
        began = time.perf_counter()
        step()
        took.append(time.perf_counter() - began)
    return median(took[1:])  # the first one allocates
