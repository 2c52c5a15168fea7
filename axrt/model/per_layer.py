"""A walk through a whole model on one rank, one layer after the other."""

# One layer is built at a time, so that this works for a model that no rank could hold. Layers of
# the same specification that are given the same shapes are visited once.

import copy
from collections.abc import Callable
from typing import Any, TypeVar

from axrt.scheduler.job import Job
from axrt.scheduler.policies import placement_for, policy_by_name
from axrt.transport.payload import copied, flatten, on

from .compiler import Compiler
from .layer_runs import RunSettings
from .layers import LayerSpec, build, specification
from .module import PipelineModule
from .precision import Types, make_narrow
from .seeds import BorrowedGenerator
from .stage import Stage

Found = TypeVar("Found")


def walk(
    model: PipelineModule,
    seed: int,
    sample: tuple[Any, Any],
    generator: BorrowedGenerator,
    visit: Callable[[Stage, bool, Any, Any], tuple[Found, Any]],
    types: Types,
    compiler: Compiler | None = None,
) -> list[Found]:
    """Visit every layer with its real input, on the generator's device.

    Args:
        model: layers and loss; it stays as it is, since modules that are given as they are and the
            loss are copied.
        seed: run seed from which weights and dropout are derived, 0 <= seed < 2**63.
        generator: random numbers of the device, borrowed by the caller.
        visit: function that is called with a stage of the one layer, whether it is the last, its
            input, and the targets; it returns a finding, and the layer's output.
    Returns:
        The findings, one a layer; layers that are alike share one.
    """
    value, target = (on(generator.device, copied(part)) for part in sample)
    loss_fn = copy.deepcopy(model.loss_fn)
    splitting = policy_by_name("zb-h1")
    job = Job(placement_for(splitting, ranks=1, microbatches=1), splitting, microbatches=1)
    known: dict[tuple[object, ...], tuple[Found, Any]] = {}
    found = []
    for place, layer in enumerate(model.layers):
        last = place == len(model.layers) - 1
        key = (
            (*specification(layer), last, shapes(value))
            if isinstance(layer, LayerSpec)
            else (place,)
        )
        if key not in known:
            module = build(model.layers, place, seed)
            module = (module if isinstance(layer, LayerSpec) else copy.deepcopy(module)).to(
                generator.device
            )
            make_narrow(module, types)
            stage = Stage(
                [module],
                place,
                loss_fn if last else None,
                RunSettings(job, generator, types=types, compiler=compiler),
            )
            known[key] = visit(stage, last, value, target)
        one, value = known[key]
        found.append(one)
    return found


def shapes(value: Any) -> tuple[object, ...]:
    """A key that is equal for payloads with the same shapes and types."""
    return tuple(
        (tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for tensor in flatten(value)[1]
    )
