"""What all buckets of a rank have in common: how they step, and where their state lives."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from .slots import Slots

OptimizerFactory = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
LrSchedule = Callable[[int], float]


def constant(step: int) -> float:
    """The schedule that leaves the learning rate as it is."""
    return 1.0


@dataclass(frozen=True)
class BucketSettings:
    """What all buckets of a rank have in common."""

    factory: OptimizerFactory  # makes the optimizer; groups may carry learning rates of their own
    schedule: LrSchedule  # `schedule(step)` is the factor on every group's learning rate
    device: torch.device
    in_float32: bool = True  # gradients of narrow parameters add up in float32 over microbatches
    # narrowest type of any copy's parameters, by which all cut alike; None: that of a bucket's own
    narrowest: torch.dtype | None = None
    team: int = 1  # number of members that hold a stage together
    pipes_a_group: int = 0  # whose copies add up among themselves before groups do; 0: all
    keeps_apart: bool = False  # what microbatches add is put aside, and summed in a tree
    microbatches: int = 0  # of a step, over all replicas
    # slots into which masters and moments come from scratch for a step; None: they stay
    slots: Slots | None = None
    # memory on the host for gradients, where masters and moments live and step there; None: they
    # step on the device
    host_slots: Slots | None = None
    # weights live in scratch as well, and come to the device for residencies
    in_scratch: bool = False

    @property
    def has_masters_apart(self) -> bool:
        """Steps are on the host, and layers compute on an accelerator."""
        return self.host_slots is not None and self.device.type != "cpu"
