"""The measured costs of each layer: it runs a microbatch forward and backward, alone, one layer
after the other."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from axrt.device.device import synchronize
from axrt.scheduler.simulation.cost_table import LayerCosts
from axrt.transport.payload import flatten

from .compiler import Compiler
from .joints import Team
from .layers import name_of, num_parameters
from .member_alone import MemberAlone
from .module import PipelineModule
from .operation_counter import OperationCounter
from .per_layer import real_layers, walk
from .precision import Types
from .seeds import BorrowedGenerator
from .stage import Stage

_TIMES = 5  # after one that warms up


def measure(
    model: PipelineModule,
    seed: int,
    sample: tuple[Any, Any],
    generator: BorrowedGenerator,
    types: Types,
    compiler: Compiler | None = None,
    team: int = 1,
) -> list[LayerCosts]:
    """The costs of every layer, on the generator's device.

    Args:
        model: layers and loss; it stays as it is.
        seed: run seed from which weights and dropout are derived, 0 <= seed < 2**63.
        generator: random numbers of the device, borrowed by the caller.
        compiler: compiler that runs the layers; None: they run as they are.
        team: number of members that hold each layer; the costs are those of one of them.
    """
    first = Team(0, team)
    built = real_layers(model, seed, generator, types, compiler, first)
    visit = partial(_measured, team)
    return named(model, walk(model, sample, generator.device, built, visit, first), team)


def named(model: PipelineModule, found: Sequence[LayerCosts], team: int) -> list[LayerCosts]:
    """The costs of layers with their names, and the numbers of parameters of whole layers."""
    if team == 1:
        pairs = zip(found, model.layers, strict=True)
        return [replace(one, name=name_of(layer)) for one, layer in pairs]
    kinds = zip(found, kinds_of(model), strict=True)
    return [replace(one, name=name, parameters=count) for one, (name, count) in kinds]


def kinds_of(model: PipelineModule) -> list[tuple[str, int]]:
    """The class and the number of parameters of each layer, by which a table of costs is known to
    be of this model."""
    return [(name_of(layer), num_parameters(layer)) for layer in model.layers]


def _measured(
    team: int, stage: Stage, last: bool, value: Any, target: Any
) -> tuple[LayerCosts, Any]:
    """The costs of the one layer of a stage, and the value that it returns."""
    device, member = stage.device, MemberAlone(stage, team)
    seconds: list[list[float]] = []
    operations = OperationCounter()
    for number in range(_TIMES + 1):
        counted = nullcontext() if number else operations  # the first one warms up
        with counted, _counting(stage.layers) as stash:
            forward_s, out = _timed(lambda: member.forward(number, value, target), device)  # noqa: B023
        wanted = gradients_like(out, last)
        input_s, _ = _timed(lambda: member.input_gradient(number, wanted), device)  # noqa: B023
        waiting, pieces = stage.deferral.waiting_bytes(number), stage.deferral.pieces(number)
        weight_s, _ = _timed(lambda: member.weight_gradient(number), device)  # noqa: B023
        seconds.append([forward_s, input_s, weight_s])
    forward, back, weight = zip(*seconds[1:], strict=True)
    forward_s, input_s, weight_s = map(statistics.median, (forward, back, weight))
    found = LayerCosts(
        forward_s,
        input_s,
        weight_s,
        sent_bytes=0 if last else sum(tensor.nbytes for tensor in flatten(out)[1]),
        stash_bytes=max(sum(stash.values()), waiting),
        spread=statistics.stdev(torch.tensor(forward).clamp(min=1e-9).log().tolist()),
        until_weight_bytes=waiting,
        parameters=sum(one.numel() for one in stage.layers.parameters()),
        operations=operations.operations,
        pieces=pieces,
        joints=tuple(member.joints),
        back_joints=tuple(member.back_joints),
        held_parameters=sum(one.numel() for _, one in stage.named_parameters()),
    )
    return found, out


def gradients_like(out: Any, last: bool) -> tuple[Tensor, ...] | None:
    """Gradients of what a layer has sent on; None for the last, whose loss has one of its own."""
    if last:
        return None
    return tuple(torch.ones_like(one) for one in flatten(out)[1] if one.requires_grad)


def _timed(run: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    synchronize(device)
    began = time.perf_counter()
    made = run()
    synchronize(device)
    return time.perf_counter() - began, made


@contextmanager
def _counting(layers: nn.Module) -> Iterator[dict[int, int]]:
    """Context that counts the bytes of memory that autograd keeps, by address, without parameters
    and buffers."""
    weights = {
        tensor.untyped_storage().data_ptr() for tensor in (*layers.parameters(), *layers.buffers())
    }
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.layout is torch.strided and tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept
