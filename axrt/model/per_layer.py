"""Through a whole model on one rank, one layer after the other.

One layer is built at a time, so that this works for a model that no rank could hold. Layers of the
same specification that are given the same shapes are visited once.
"""

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from axrt.payload import copied, flatten, on

from .compiler import Compiler
from .layers import LayerSpec, build
from .module import PipelineModule
from .seeds import BorrowedGenerator
from .stage import Stage

Found = TypeVar("Found")


def walk(
    model: PipelineModule,
    seed: int,
    sample: tuple[Any, Any],
    generator: BorrowedGenerator,
    visit: Callable[[Stage, bool, Any, Any], tuple[Found, Any]],
    compute: torch.dtype | None,
    compiler: Compiler | None = None,
) -> list[Found]:
    """What a visit finds in every layer, on the generator's device.

    Args:
        model: stays as it is: modules that are given as they are are copied, and so is the loss.
        seed: of the run.
        sample: a microbatch, (inputs, targets).
        generator: borrowed by the caller.
        visit: called with a stage of the one layer, whether it is the last, what enters it, and the
            targets; returns what it finds, and what the layer hands on.
        compute, compiler: as for `Stage`.
    """
    value, target = (on(generator.device, copied(part)) for part in sample)
    loss_fn = copy.deepcopy(model.loss_fn)
    known: dict[tuple[object, ...], tuple[Found, Any]] = {}
    found = []
    for place, layer in enumerate(model.layers):
        last = place == len(model.layers) - 1
        key = (
            (*_specification(layer), last, _shapes(value))
            if isinstance(layer, LayerSpec)
            else (place,)
        )
        if key not in known:
            module = build(model.layers, place, seed)
            module = (module if isinstance(layer, LayerSpec) else copy.deepcopy(module)).to(
                generator.device
            )
            stage = Stage(
                [module],
                place,
                loss_fn if last else None,
                1,
                generator,
                compute=compute,
                splits=True,
                compiler=compiler,
            )
            known[key] = visit(stage, last, value, target)
        one, value = known[key]
        found.append(one)
    return found


def _specification(layer: LayerSpec) -> tuple[object, ...]:
    """Equal for layers that are built alike."""
    return (
        layer.typename,
        repr(layer.args),
        repr(layer.kwargs),
        getattr(layer, "forward_fn", None),
    )


def _shapes(value: Any) -> tuple[object, ...]:
    return tuple(
        (tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for tensor in flatten(value)[1]
    )
