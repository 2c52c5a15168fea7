"""Compiles the stages of a rank before the first step."""

# A rank that compiled within the step would keep every other one waiting, stage after stage,
# forward and then backward. Before the step all ranks compile at once, for each computes by itself
# the values that will enter its stages.

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from axrt.config import Config
from axrt.errors import ConfigError
from axrt.model.module import PipelineModule
from axrt.model.per_layer import real_layers, walk
from axrt.model.precision import types_of
from axrt.model.seeds import BorrowedGenerator
from axrt.model.stage import Stage
from axrt.store.local_model import LocalModel
from axrt.transport.payload import copied, detached, flatten, on


# Stages rehearse compilation, not copies of layers: guards of torch see modes and inlets.
def precompile(
    here: LocalModel,
    model: PipelineModule,
    config: Config,
    sample: tuple[Any, Any],
    generator: BorrowedGenerator,
) -> None:
    """Run every stage once as training and once as an evaluation, so that it compiles.

    Modules are afterwards as they were, except for state inside objects of the user's own.

    Args:
        model, config: model and settings of the run; every layer returns a payload that may travel.
        generator: random numbers of the device, borrowed by the caller.
    Raises:
        ConfigError: a layer changes its parameters as it runs.
    """
    try:
        types = types_of(config.precision)
        built = real_layers(model, config.run.seed, generator, types)
        entering = walk(model, sample, generator.device, built, _what_enters)
        target = on(generator.device, sample[1])
        stages = [
            (stage, entering[stage.first_layer])
            for stage in here.stages.values()
            if isinstance(stage, Stage) and stage.layers
        ]
        loss = model.loss_fn.modules() if isinstance(model.loss_fn, nn.Module) else ()
        with _as_before(
            [*(module for _, layer in here.layers() for module in layer.modules()), *loss]
        ):
            for stage, value in stages:
                _train_once(stage, copied(value), copied(target))
            with here.evaluating():
                for stage, value in stages:
                    stage.evaluation.run(0, copied(detached(value)), copied(target))
        here.drop()
    except Exception as error:
        error.add_note(
            f"while compiling as run.compile = {config.run.compile!r} wants it; run.compile = '' "
            "trains without"
        )
        raise


def _what_enters(stage: Stage, last: bool, value: Any, target: Any) -> tuple[Any, Any]:
    before = copied(value)  # the layer may work in place
    return before, stage.forward(0, value, copied(target))


def _train_once(stage: Stage, value: Any, target: Any) -> None:
    out = stage.forward(0, value, target)
    if stage.recomputed:
        stage.recompute(0)
    stage.backward(
        0, tuple([torch.ones_like(tensor) for tensor in flatten(out)[1] if tensor.requires_grad])
    )
    stage.drop()


@contextmanager
def _as_before(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Context after which attributes are bound as they were, in modules and in their dicts and
    lists, and buffers have their values."""
    modules = list(modules)
    attributes = [(module.__dict__, dict(module.__dict__)) for module in modules]
    dicts = [
        (value, dict(value))
        for _, names in attributes
        for value in names.values()
        if isinstance(value, dict)
    ]
    lists = [
        (value, list(value))
        for _, names in attributes
        for value in names.values()
        if isinstance(value, list)
    ]
    buffers = [
        (buffer, buffer.clone()) for module in modules for buffer in module.buffers(recurse=False)
    ]
    parameters = [
        (parameter, parameter._version)
        for module in modules
        for parameter in module.parameters(recurse=False)
    ]
    try:
        yield
    finally:
        for names, before in (*attributes, *dicts):
            _put_back(names, before)
        for values, kept in lists:
            values[:] = kept
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
    if any(parameter._version != version for parameter, version in parameters):
        raise ConfigError(
            "a layer changes its own parameters as it runs, which nothing can take back; expected "
            "that of its buffers at most"
        )


def _put_back(names: dict[Any, Any], before: dict[Any, Any]) -> None:
    """Restore only the names that have changed: torch's guards watch these dicts."""
    for name in names.keys() - before.keys():
        del names[name]
    names.update(
        {name: value for name, value in before.items() if names.get(name, names) is not value}
    )
