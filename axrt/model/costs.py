"""The measured costs of each layer: it runs a microbatch forward and backward, alone, one layer
after the other."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from axrt.device.device import synchronize
from axrt.scheduler.simulation.cost_table import LayerCosts
from axrt.transport.payload import flatten

from .compiler import Compiler
from .layers import name_of, num_parameters
from .module import PipelineModule
from .per_layer import walk
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
) -> list[LayerCosts]:
    """The costs of every layer, on the generator's device.

    Args:
        model: layers and loss; it stays as it is.
        seed: run seed from which weights and dropout are derived, 0 <= seed < 2**63.
        generator: random numbers of the device, borrowed by the caller.
        compiler: compiler that runs the layers; None: they run as they are.
    """
    found = walk(model, seed, sample, generator, _measured, types, compiler)
    named = zip(found, map(name_of, model.layers), strict=True)
    return [replace(one, name=name) for one, name in named]


def kinds_of(model: PipelineModule) -> list[tuple[str, int]]:
    """The class and the number of parameters of each layer, by which a table of costs is known to
    be of this model."""
    return [(name_of(layer), num_parameters(layer)) for layer in model.layers]


def _measured(stage: Stage, last: bool, value: Any, target: Any) -> tuple[LayerCosts, Any]:
    """The costs of the one layer of a stage, and the value that it returns."""
    device = stage.device
    seconds: list[list[float]] = []
    operations = FlopCounterMode(display=False)
    for number in range(_TIMES + 1):
        counted = nullcontext() if number else operations  # the first one warms up
        with counted, _counting(stage.layers) as stash:
            forward_s, out = _timed(lambda: stage.forward(number, value, target), device)  # noqa: B023
        wanted = (
            None
            if last
            else tuple(
                torch.ones_like(tensor) for tensor in flatten(out)[1] if tensor.requires_grad
            )
        )
        input_s, _ = _timed(lambda: stage.input_gradient(number, wanted), device)  # noqa: B023
        waiting, pieces = stage.deferral.waiting_bytes(number), stage.deferral.pieces(number)
        weight_s, _ = _timed(lambda: _all_pieces(stage, number), device)  # noqa: B023
        seconds.append([forward_s, input_s, weight_s])
    forward, back, weight = zip(*seconds[1:], strict=True)
    sent = 0 if last else sum(tensor.nbytes for tensor in flatten(out)[1])
    spread = statistics.stdev(torch.tensor(forward).clamp(min=1e-9).log().tolist())
    forward_s, input_s, weight_s = map(statistics.median, (forward, back, weight))
    stash_bytes = max(sum(stash.values()), waiting)
    found = LayerCosts(forward_s, input_s, weight_s, sent, stash_bytes, spread, waiting)
    parameters = sum(parameter.numel() for parameter in stage.layers.parameters())
    operated = operations.get_total_flops()
    return replace(found, parameters=parameters, operations=operated, pieces=pieces), out


def _all_pieces(stage: Stage, number: int) -> None:
    while stage.deferral.pieces(number):
        stage.deferral.run_piece(number)


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
