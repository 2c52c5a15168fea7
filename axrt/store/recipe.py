"""What the user has given: a model, and how it is stepped."""

from typing import Any, NamedTuple

from axrt.model.layers import name_of
from axrt.model.module import PipelineModule

from .bucket_settings import LrSchedule, OptimizerFactory


class Recipe(NamedTuple):
    """What the user has given, the same on every rank."""

    model: PipelineModule
    factory: OptimizerFactory  # makes the optimizer of a bucket
    lr_schedule: LrSchedule  # gives the factor on the learning rate for a step
    sample: Any  # a microbatch, (inputs, targets), on the main rank; None: there is none

    @property
    def layers(self) -> list[str]:
        """The names of the layers."""
        return [name_of(layer) for layer in self.model.layers]
