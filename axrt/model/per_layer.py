"""A walk through a whole model on one rank, one layer after the other."""

# One layer is built at a time, so that this works for a model that no rank could hold. Layers of
# the same specification that are given the same shapes are visited once.

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from axrt.scheduler.job import Job
from axrt.scheduler.policies import placement_for, policy_by_name
from axrt.transport.payload import copied, flatten, on

from .compiler import Compiler
from .joints import ALONE, Team
from .layer_runs import RunSettings
from .layers import LayerSpec, build, specification
from .module import PipelineModule
from .precision import Types, make_narrow
from .seeds import BorrowedGenerator
from .stage import Stage
from .team_layers import TeamLayers
from .tensor_cuts import TensorCuts
from .tensor_plan import Plan

Found = TypeVar("Found")
StageOf = Callable[[int], Stage]  # the stage of the one layer at a place, with the loss at the last


def walk(
    model: PipelineModule,
    sample: tuple[Any, Any],
    device: torch.device,
    stage_of: StageOf,
    visit: Callable[[Stage, bool, Any, Any], tuple[Found, Any]],
    team: Team = ALONE,
) -> list[Found]:
    """Visit every layer with its real input.

    Args:
        model: layers and loss; it stays as it is.
        device: device that the layers of `stage_of` compute on.
        visit: function that is called with a stage of the one layer, whether it is the last, its
            input, and the targets; it returns a finding, and the layer's output.
        team: first member of the team that the stages are of.
    Returns:
        The findings, one a layer; layers that are alike share one.
    """
    value, target = (on(device, copied(part)) for part in sample)
    known: dict[tuple[object, ...], tuple[Found, Any]] = {}
    found = []
    for place, layer in enumerate(model.layers):
        last = place == len(model.layers) - 1
        key: tuple[object, ...] = (place,)
        if isinstance(layer, LayerSpec):
            cut = _cut_of(model.tensor, place, layer, team)
            key = (*specification(layer), last, shapes(value), *cut)
        if key not in known:
            known[key] = visit(stage_of(place), last, value, target)
        one, value = known[key]
        found.append(one)
    return found


def real_layers(
    model: PipelineModule,
    seed: int,
    generator: BorrowedGenerator,
    types: Types,
    compiler: Compiler | None = None,
    team: Team = ALONE,
) -> StageOf:
    """A function that builds the stage of a layer on the generator's device; modules that are given
    as they are and the loss are copied.

    Args:
        seed: run seed from which weights and dropout are derived, 0 <= seed < 2**63.
        generator: random numbers of the device, borrowed by the caller.
    """
    loss_fn, last = copy.deepcopy(model.loss_fn), len(model.layers) - 1
    of_team = TeamLayers(model.tensor, team)
    settings = RunSettings(job_of_one(), generator, types=types, compiler=compiler, of_team=of_team)

    def stage_of(place: int) -> Stage:
        module = build(model.layers, place, seed)
        if not isinstance(model.layers[place], LayerSpec):
            module = copy.deepcopy(module)
        TensorCuts(model.tensor, team).cut(place, module)
        module = module.to(generator.device)
        make_narrow(module, types)
        return Stage([module], place, loss_fn if place == last else None, settings)

    return stage_of


def job_of_one() -> Job:
    """A job whose backwards are split, of one microbatch on one rank."""
    splitting = policy_by_name("zb-h1")
    return Job(placement_for(splitting, ranks=1, microbatches=1), splitting, microbatches=1)


def shapes(value: Any) -> tuple[object, ...]:
    """A key that is equal for payloads with the same shapes and types."""
    return tuple(
        (tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for tensor in flatten(value)[1]
    )


def _cut_of(plan: Plan, place: int, layer: LayerSpec, team: Team) -> tuple[object, ...]:
    """What is cut of a layer, and how a member runs it; equal for layers that are cut alike."""
    if team.size == 1 or not issubclass(layer.typename, nn.Module):
        return ()
    way = TeamLayers(plan, team).way_of(place, layer)
    return (way, place > 0, *TensorCuts(plan, team).of(place, layer.looked_at))
