"""Any module as a pipeline: its exported graphs, cut into layers."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from axrt.config import Config
from axrt.errors import ConfigError, OutputTypeError
from axrt.model.layers import Layer
from axrt.model.module import LossFunction, PipelineModule
from axrt.model.precision import Types, in_type, types_of
from axrt.transport.payload import flatten

from .cuts import cuts_of
from .exporting import computing, exported
from .layer import Shapes, TracedLayer, place_in
from .operations import counted_operations
from .program import Program
from .run import Run
from .ties import tied


class TracedModule(PipelineModule):
    """A pipeline of the layers of a module's graph, in which types are written."""

    def __init__(self, layers: Sequence[Layer], loss_fn: LossFunction, types: Types) -> None:
        super().__init__(layers, loss_fn, partition_method="operations")
        self._types = types

    def check_settings(self, config: Config) -> None:
        """Check that types are those that the module was traced for, and that no team holds it.

        Raises:
            ConfigError: it is otherwise.
        """
        asked = types_of(config.precision)
        for key in ("compute", "weights"):
            mine, its = getattr(self._types, key), getattr(asked, key)
            if mine != its:
                raise ConfigError(
                    f"precision.{key} = {_called(its)!r}, and the module was traced for "
                    f"{_called(mine)!r}, which is written in its graph; expected "
                    f"axrt.traced(..., {key}={_called(its)!r})"
                )
        if config.parallel.virtual_members > 1:
            key, off = config.parallel.cut_by
            raise ConfigError(
                f"{key} = {config.parallel.virtual_members}, and a traced module has shapes of "
                f"whole layers in its graph; expected {key} = {off}, or an axrt.PipelineModule of "
                "its layers that says how they are cut"
            )


def traced(
    module: nn.Module,
    sample: Any,
    loss_fn: LossFunction,
    *,
    compute: str = "float32",
    weights: str = "float32",
) -> TracedModule:
    """Any module as a pipeline, without naming its layers.

    `torch.export` makes its graph twice, for training and for evaluation, and the graphs are cut
    into layers where least is alive. Nothing in the module changes: its parameters, buffers and
    linear modules are those of the layers, under their own names, and its parameters have the
    trained values when the engine is closed. Those that several layers share are copied.

    Args:
        module: the module. On the meta device it may be planned, and not trained.
        sample: a microbatch, (inputs, targets), on the module's device. Of tensors shapes and types
            matter. The module is called with inputs that are a tensor, with the values of a tuple,
            or with those of a dict by keyword; and every microbatch is to have such inputs.
        loss_fn: function whose `loss_fn(outputs, targets)` gives the loss, see `PipelineModule`.
            The outputs are what the module returns.
        compute, weights: `precision.compute` and `precision.weights` of the training.
    Returns:
        The pipeline. Where nothing else is set, stages are cut by the operations of layers.
    Raises:
        ConfigError: the module is none, the sample is no pair, or a type is no choice of its key.
        ModelError: the module cannot be exported, since its Python code branches on values of
            tensors for example; the text has the line.
    """
    inputs = _inputs_of(module, sample)
    precision = {"compute": compute, "weights": weights}
    types = types_of(Config.read({"precision": precision}).precision)
    graphs = exported(module, inputs, types)
    training, evaluation = (Program(graph, module) for graph in graphs)
    if changed := training.changed | evaluation.changed:
        training, evaluation = (Program(graph, module, changed) for graph in graphs)
    with computing(types, inputs):
        operations = counted_operations(training)
    cuts, others = cuts_of(training, evaluation, operations)
    device = next((one.device.type for one in module.parameters()), "cpu")
    layers: list[TracedLayer] = []
    shared: tuple[dict[tuple[object, ...], Tensor], ...] = ({}, {})
    for mine, other in zip(_bounds(training, cuts), _bounds(evaluation, others), strict=True):
        runs = (
            Run(training, *mine, "in_training", shared[0]),
            Run(evaluation, *other, "in_evaluation", shared[1]),
        )
        shapes = None if layers else Shapes.of(in_type(inputs, types.weights or torch.float32))
        layers.append(_layer(runs, shapes, operations, device))
    return TracedModule(tied(layers), loss_fn, types)


def _inputs_of(module: Any, sample: Any) -> Any:
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"axrt.traced got a {type(module).__name__}; expected a torch.nn.Module, then a "
            "microbatch and a loss"
        )
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        raise ConfigError(
            f"axrt.traced got a sample of type {type(sample).__name__}"
            f"{f' of length {len(sample)}' if isinstance(sample, tuple | list) else ''}; expected "
            "a microbatch, (inputs, targets), as the training has them"
        )
    try:
        _, tensors = flatten(sample[0])
    except OutputTypeError as error:
        raise ConfigError(
            f"axrt.traced got inputs of a microbatch that cannot travel: {error}. Of a "
            "BatchEncoding make a dict, in each microbatch"
        ) from None
    if not tensors:
        raise ConfigError("axrt.traced got inputs without a tensor; expected those of a microbatch")
    devices = {one.device.type for one in (*module.parameters(), *tensors)}
    if len(devices) > 1:
        raise ConfigError(
            f"axrt.traced got a module and a sample on {' and '.join(sorted(devices))}; expected "
            "both on one device"
        )
    return sample[0]


def _bounds(program: Program, cuts: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip((0, *cuts), (*cuts, len(program.steps)), strict=True))


def _layer(
    runs: tuple[Run, Run], sample: Shapes | None, operations: Mapping[Node, int], device: str
) -> TracedLayer:
    training, evaluation = runs
    # One more, so that layers without products are shared out too.
    done = 1 + sum(operations.get(step, 0) for step in training.steps)
    about = training.called, done, training.looked_up
    layer = TracedLayer(training.part, evaluation.part, sample, *about, device)
    held = training.state | evaluation.state
    for name, (one, persistent) in sorted(held.items(), key=lambda item: item[0].count(".")):
        place_in(layer, name, one, persistent)
    return layer


def _called(dtype: torch.dtype | None) -> str:
    return str(dtype or torch.float32).removeprefix("torch.")
