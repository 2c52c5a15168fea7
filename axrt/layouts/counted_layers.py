"""What layers would do on a device that is only described: nothing is computed, and no memory is
taken."""

# The stage of a run computes with fake tensors, layer by layer, as the ledger has them, and a
# roofline stands in for the clock. So joints, weight gradients that wait, types and what is kept
# are those of a run. What is not counted: what a kernel's start takes, and how layers of a model
# that a compiler has fused would differ.

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from axrt.config import Config
from axrt.errors import ConfigError
from axrt.ledger.skeleton import Skeletons
from axrt.ledger.sketch import Sketch, Sketches, bytes_apart, fake, fake_tensors, saved_by_graphs
from axrt.model.costs import gradients_like, named
from axrt.model.joints import Team
from axrt.model.layer_runs import RunSettings
from axrt.model.member_alone import MemberAlone
from axrt.model.module import PipelineModule
from axrt.model.per_layer import job_of_one, walk
from axrt.model.precision import types_of
from axrt.model.stage import Stage
from axrt.model.team_layers import TeamLayers
from axrt.scheduler.cluster.cluster import Device
from axrt.scheduler.simulation.cost_table import LayerCosts
from axrt.transport.payload import flatten

from .roofline import Counted, RooflineCounter, seconds_on


class LayerCounts(NamedTuple):
    """What one microbatch does on one layer, or on a member's part of it."""

    # operations of torch of a forward, an input gradient, and the weight gradients that can wait
    forward: tuple[Counted, ...]
    back: tuple[Counted, ...]
    weight: tuple[Counted, ...]
    costs: LayerCosts  # all that is no time

    def on(self, device: Device) -> LayerCosts:
        """The costs on a device.

        Raises:
            ValueError: its operations a second are not known of a type that is computed in.
        """
        parts = (self.forward, self.back, self.weight)
        forward_s, input_s, weight_s = (seconds_on(device, one) for one in parts)
        return replace(self.costs, forward_s=forward_s, input_s=input_s, weight_s=weight_s)


def counted_layers(
    model: PipelineModule, config: Config, sample: Any, team: int = 1
) -> list[LayerCounts]:
    """What a microbatch does on every layer; layers that are alike share one.

    Args:
        config: settings, of which the types and `parallel.gather_again` count.
        sample: a microbatch, (inputs, targets), of any values.
        team: number of members that hold each layer; the counts are those of one of them.
    Raises:
        ConfigError: a layer cannot run without values.
    """
    first = Team(0, team)
    skeletons = Skeletons(model.layers)
    if team > 1:
        skeletons = skeletons.of_team(model.tensor, first)
    types, last = types_of(config.precision), len(model.layers) - 1
    sketches = Sketches(skeletons, types)
    try:
        with fake_tensors(config.run.seed) as generator:
            of_team = TeamLayers(model.tensor, first)
            settings = RunSettings(
                job_of_one(),
                generator,
                types=types,
                of_team=of_team,
                gathers_again=config.parallel.gather_again,
            )

            def stage_of(place: int) -> Stage:
                layers = sketches.layers([place])
                return Sketch(layers, place, model.loss_fn if place == last else None, settings)

            given = tuple(map(fake, sample))
            visit = partial(_counted, team)
            found = walk(model, (given[0], given[1]), generator.device, stage_of, visit, first)
    except (Exception, SystemExit) as error:  # of the user's layers, whatever it is
        said = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
        raise ConfigError(
            f"a layer cannot be modelled: {said}; expected layers that run on tensors without "
            "values; or costs that are measured, by axrt profile without --cluster"
        ) from error
    costs = named(model, [one.costs for one in found], team)
    pairs = zip(found, costs, strict=True)
    made = {id(one): one._replace(costs=of) for one, of in pairs}  # alike, they have one name
    return [made[id(one)] for one in found]


def different(counts: Iterable[LayerCounts]) -> list[LayerCounts]:
    """The counts without those that layers share, as layers that are alike do."""
    return list({id(one): one for one in counts}.values())


def _counted(
    team: int, stage: Stage, last: bool, value: Any, target: Any
) -> tuple[LayerCounts, Any]:
    """What is done on the one layer of a stage, and the value that it returns."""
    member = MemberAlone(stage, team)
    for _, parameter in stage.named_parameters():
        parameter.grad = torch.zeros_like(parameter)  # as from the second microbatch on
    weights = [*stage.layers.parameters(), *stage.layers.buffers()]

    def counted(run: Callable[[], Any]) -> tuple[RooflineCounter, Any]:
        with RooflineCounter() as counter:
            made = run()
        return counter, made

    with saved_by_graphs() as saved:
        forward, out = counted(lambda: member.forward(0, value, target))
        stash = bytes_apart([*saved(), *stage.open(0).kept_beside()], weights)
        back, _ = counted(lambda: member.input_gradient(0, gradients_like(out, last)))
    waiting, pieces = stage.deferral.waiting_bytes(0), stage.deferral.pieces(0)
    weight, _ = counted(lambda: member.weight_gradient(0))
    costs = LayerCosts(
        *(0.0, 0.0, 0.0),
        sent_bytes=0 if last else sum(one.nbytes for one in flatten(out)[1]),
        stash_bytes=max(stash, waiting),
        spread=0.0,
        until_weight_bytes=waiting,
        parameters=sum(one.numel() for one in stage.layers.parameters()),
        operations=forward.operations,
        pieces=pieces,
        joints=tuple(member.joints),
        back_joints=tuple(member.back_joints),
        held_parameters=sum(one.numel() for _, one in stage.named_parameters()),
    )
    parts = [tuple(one.counted) for one in (forward, back, weight)]
    return LayerCounts(parts[0], parts[1], parts[2], costs), out
