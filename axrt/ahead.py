"""Compiles what a rank holds before the first step.

A rank that compiled within the step would keep every other one waiting, stage after stage, forward and then backward. Ahead of it all ranks
compile at once, for each finds out by itself what will enter its stages.
"""

from typing import Any

import torch

from axrt.config import Config
from axrt.holding import TYPES, Holding
from axrt.model.module import PipelineModule
from axrt.model.seeds import BorrowedGenerator
from axrt.model.stage import Stage
from axrt.model.walk import walk
from axrt.payload import detached, flatten, on


def compile_ahead(holding: Holding, model: PipelineModule, config: Config, sample: tuple[Any, Any], generator: BorrowedGenerator) -> None:
    """Run every stage once as training and once as an evaluation; parameters, gradients and buffers are afterwards as they were.

    Args:
        holding: this rank's, whose stages compile.
        model, config: of the run.
        sample: a microbatch, (inputs, targets), like those that will come.
        generator: borrowed by the caller.
    """
    entering = walk(model, config.run.seed, sample, generator, _what_enters, TYPES[config.precision.compute])
    target = on(generator.device, sample[1])
    stages = [(stage, entering[stage.first_layer]) for stage in holding.stages.values() if stage.layers]
    try:
        for stage, value in stages:
            _train_once(stage, value, target)
        with holding.evaluating():
            for stage, value in stages:
                stage.evaluate(0, detached(value), target)
    except Exception as error:
        error.add_note(f"while compiling as run.compile = {config.run.compile!r} wants it; run.compile = '' trains without")
        raise


def _what_enters(stage: Stage, last: bool, value: Any, target: Any) -> tuple[Any, Any]:
    return value, stage.forward(0, value, target)


def _train_once(stage: Stage, value: Any, target: Any) -> None:
    buffers = [(buffer, buffer.clone()) for buffer in stage.layers.buffers()]
    out = stage.forward(0, value, target)
    stage.backward(0, tuple([torch.ones_like(tensor) for tensor in flatten(out)[1] if tensor.requires_grad]))
    stage.drop()
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
