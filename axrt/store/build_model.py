"""Builds the part of the model that a rank holds: layers, buckets with their optimizers, and
places in scratch."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from axrt.config import Config
from axrt.device.device import CPU
from axrt.errors import ConfigError
from axrt.model.compiler import Compiler
from axrt.model.joints import Team
from axrt.model.layer_runs import RunSettings
from axrt.model.layers import build
from axrt.model.listed import ListedParameters
from axrt.model.matrices import trained_in
from axrt.model.module import PipelineModule
from axrt.model.precision import NarrowLayers, types_of
from axrt.model.seeds import BorrowedGenerator
from axrt.model.stage import Stage
from axrt.model.team_layers import TeamLayers
from axrt.model.tensor_cuts import Part, Parts, TensorCuts
from axrt.model.virtual_layers import VirtualBuilder
from axrt.model.virtual_members import VirtualMembers
from axrt.offload.tier import Tier
from axrt.scheduler.bucket import BucketCopy
from axrt.scheduler.job import Job
from axrt.world.mesh import Mesh

from .assign import BucketSpec, Share, buckets_as_built
from .bucket import Bucket
from .bucket_settings import BucketSettings
from .local_model import LocalModel
from .loss_scale import LossScale
from .owners import by_owner, owners_of_stage
from .probe import options_of, probed
from .recipe import Recipe
from .scratch import refused_as_setting
from .scratch_stash import ScratchStash
from .shards import cut_of
from .slots import Slots

_MIB = 1024 * 1024


def build_model(
    recipe: Recipe,
    job: Job,
    mesh: Mesh,
    config: Config,
    generator: BorrowedGenerator,
    compiler: Compiler | None,
    scratch: Tier | None = None,
) -> LocalModel:
    """Build the part of the model that this rank holds.

    Args:
        job: schedule that says where the model is cut, and which rank holds what.
        compiler: compiler that runs the layers; None: they run as they are.
        scratch: tier for masters and moments, and for stashes; None: all stay on the device.
    Raises:
        ConfigError: scratch has no room for them.
    """
    device = generator.device
    offloads_state = scratch is not None and config.memory.offload != "none"
    slots = Slots(scratch, device) if scratch and offloads_state else None
    host = scratch if config.memory.steps_on_host else None
    host_slots = Slots(host, CPU, device != CPU) if host else None
    has_stash = job.offloads_stash(mesh.pipe_rank)
    types, of = types_of(config.precision), config.precision
    narrow = NarrowLayers(types) if types.weights else None
    loss_scale = LossScale(of) if of.scales else None
    to_step = _to_step(recipe, config, job, device, slots, host_slots)
    team = Team(mesh.member, mesh.tensor)
    count = config.parallel.virtual_members // mesh.tensor
    virtual = VirtualBuilder(recipe.model.layers, recipe.model.tensor, team, count, types)
    of_team = TeamLayers(recipe.model.tensor, team)
    replica, scale_of = mesh.data_rank, loss_scale.of if loss_scale else None
    again = config.parallel.gather_again
    to_run = RunSettings(job, generator, replica, types, compiler, scale_of, True, of_team, again)
    builder = _Builder(recipe.model, config, to_step, to_run, narrow, virtual)
    stages: dict[int, Stage | VirtualMembers] = {}
    buckets, pipes = {}, {}
    for stage in job.placement.stages_of(mesh.pipe_rank):
        pipes[stage] = job.pipe_of(mesh.data_rank, mesh.pipe_rank, stage, mesh.member)
        stages[stage], buckets[stage] = builder.stage(stage, pipes[stage], has_stash)
    with_state = [bucket for of in buckets.values() for bucket in of if bucket.optimizer]
    if slots:
        slots.allocate(min(job.slots, len(with_state)))
    if host_slots:
        host_slots.allocate(min(job.host_slots, len(with_state)))
    stash = ScratchStash(scratch, device) if scratch and has_stash else None
    built = LocalModel(
        *(stages, buckets, pipes, narrow, loss_scale, scratch if slots else None),
        *(slots, host_slots, stash),
        _given_as_modules(recipe.model),
    )
    return replace(built, listed=ListedParameters(built.layers()), parts=builder.parts)


def _to_step(
    recipe: Recipe,
    config: Config,
    job: Job,
    device: torch.device,
    slots: Slots | None,
    host_slots: Slots | None,
) -> BucketSettings:
    """What all buckets of a rank have in common."""
    return BucketSettings(
        recipe.factory,
        recipe.lr_schedule,
        device,
        in_float32=config.precision.gradients == "float32",
        narrowest=types_of(config.precision).weights,
        team=job.team,
        pipes_a_group=job.pipes_a_group,
        keeps_apart=job.in_tree,
        microbatches=job.microbatches_in_all,
        slots=slots,
        host_slots=host_slots,
        in_scratch=job.offloads_weights,
    )


def _given_as_modules(model: PipelineModule) -> frozenset[int]:
    """The indices of the layers that the user has built himself."""
    layers = enumerate(model.layers)
    return frozenset([place for place, layer in layers if isinstance(layer, nn.Module)])


class _Builder:
    """Builds stages with their buckets, one after the other.

    Attributes:
        parts: what this member of a team has of the parameters that its members share out.
    """

    def __init__(
        self,
        model: PipelineModule,
        config: Config,
        to_step: BucketSettings,
        to_run: RunSettings,
        narrow: NarrowLayers | None,
        virtual: VirtualBuilder,
    ) -> None:
        self._model, self._config, self._narrow = model, config, narrow
        self._virtual = virtual
        self._to_step, self._to_run = to_step, to_run
        self.parts: dict[str, Part] = {}

    def stage(
        self, stage: int, pipe: int, offloads: bool
    ) -> tuple[Stage | VirtualMembers, tuple[Bucket, ...]]:
        """Build a stage and its buckets.

        Args:
            pipe: the pipe whose copy it is.
            offloads: what autograd saves of a microbatch may leave the device.
        """
        config, job = self._config, self._to_run.job
        places = range(job.cuts[stage], job.cuts[stage + 1])
        virtual = len(self._virtual.teams)
        cuts = TensorCuts(self._model.tensor, self._to_run.of_team.team, virtual)
        layers = _Layers(
            self._model, places, config.run.seed, self._to_run.generator.device, self._narrow, cuts
        )
        bucket_bytes = config.memory.bucket_mb * _MIB
        specs = buckets_as_built(
            *(self._model.layers, job.cuts, stage, layers, job.pipes, bucket_bytes),
            Share(*self._to_run.of_team.team, cuts.parts, job.shards),
        )
        shards = job.pipes_a_group if job.shards else 1
        model, factory = self._model.layers, self._to_step.factory
        trained = (one for place in places for one in trained_in(model[place], place))
        owners = owners_of_stage(factory, model, trained, shards)
        made = {}
        for number, found in specs:  # each as soon as its layers are there
            self._check_steps_parts(found, cuts.parts)
            spec, cut = by_owner(found, cut_of(config, job, pipe, found.copies), owners)
            with refused_as_setting():
                made[number] = Bucket(
                    spec,
                    [layers.places[name] for name, _ in spec.named],
                    BucketCopy(pipe, stage, number),
                    self._to_step,
                    self._types_of([parameter for _, parameter in spec.named]),
                    cut,
                    cuts.virtual_parts,
                )
        buckets = tuple(made[number] for number in sorted(made))
        self.parts |= cuts.parts
        if virtual > 1:
            return self._of_virtual(stage, layers.built, cuts.virtual_parts, buckets), buckets
        built = self._stage(stage, layers.built, self._to_run, offloads)
        built.cut_at({bucket.first_layer for bucket in buckets})
        for bucket in buckets:
            bucket.factors.watch(built, bucket.state.stepped_by_name, bucket.shard is not None)
        return built, buckets

    def _stage(
        self, stage: int, layers: Sequence[nn.Module], to_run: RunSettings, offloads: bool
    ) -> Stage:
        job = to_run.job
        loss_fn = self._model.loss_fn if stage == job.last_stage else None
        recomputed = job.recomputed.get(stage, 0)
        return Stage(layers, job.cuts[stage], loss_fn, to_run, recomputed, offloads)

    def _of_virtual(
        self, stage: int, own: Sequence[nn.Module], parts: Parts, buckets: Sequence[Bucket]
    ) -> VirtualMembers:
        """The stage of the virtual members of this rank, whose gradients go to its buckets."""
        to_run, seed = self._to_run, self._config.run.seed
        first = to_run.job.cuts[stage]
        layers = self._virtual.build(own, first, parts, seed, to_run.generator.device)
        for bucket in buckets:
            bucket.take_from(layers)
        members = [
            self._stage(
                stage, of, replace(to_run, of_team=TeamLayers(self._model.tensor, team)), False
            )
            for of, team in zip(layers.of_members, self._virtual.teams, strict=True)
        ]
        return VirtualMembers(members, layers, own, to_run.of_team.team, stage == 0)

    def _check_steps_parts(self, spec: BucketSpec, parts: Parts) -> None:
        """Check that an optimizer steps parts of parameters as it steps the whole."""
        cut = next((name for name, _ in spec.named if name in parts), None)
        if cut is None:
            return
        factory = self._to_step.factory
        whole = [(name, _whole(one, parts[name])) for name, one in spec.named]
        if options_of(factory, spec.named) != options_of(factory, whole):
            raise ConfigError(
                f"the members of a team share {cut} out (parallel.tensor), and the optimizer's "
                "factory gives a part of it other options than the whole; expected options that "
                "depend on names, and not on shapes"
            )
        if probed(factory, spec.named).elementwise:
            return
        raise ConfigError(
            f"the members of a team share {cut} out (parallel.tensor), and the optimizer is none "
            "that is known to step each element by itself; expected one of torch's that does, such "
            "as AdamW, without hooks"
        )

    def _types_of(self, parameters: list[nn.Parameter]) -> list[torch.dtype | None]:
        """The narrow type of each; [] where none is narrow."""
        return [self._narrow.type_of(one) for one in parameters] if self._narrow else []


def _whole(part: nn.Parameter, of: Part) -> nn.Parameter:
    """A parameter without memory, of the shape of the whole of which a member has a part."""
    whole = torch.empty(of.shape, dtype=part.dtype, device="meta")
    made = nn.Parameter(whole, requires_grad=part.requires_grad)
    made.__dict__.update(part.__dict__)
    return made


# Layers are built as buckets ask for them, so a narrow run never has its whole stage in float32.
class _Layers:
    """The layers of a stage, each built when it is asked for: a rank never holds more than what it
    has made of them and one layer.

    Args:
        narrow: layers in a narrow type, to which each is added; None: there are none.
        cuts: what members of a team share out is cut by it.
    Attributes:
        built: layers that were built.
        places: numbers that order parameters as the whole model does, by name: by layer, then as
            the layer lists them.
    """

    def __init__(
        self,
        model: PipelineModule,
        places: range,
        seed: int,
        device: torch.device,
        narrow: NarrowLayers | None,
        cuts: TensorCuts,
    ) -> None:
        self._model, self._of_stage, self._seed = model, places, seed
        self._device, self._narrow, self._cuts = device, narrow, cuts
        self.built: list[nn.Module] = []
        self.places: dict[str, int] = {}

    def __iter__(self) -> Iterator[tuple[int, list[tuple[str, nn.Parameter]]]]:
        """The index of each layer, and the trained parameters that no layer before has."""
        seen: set[nn.Parameter] = set()
        for place in self._of_stage:
            layer = build(self._model.layers, place, self._seed)
            _check_values(place, layer)
            # Of the whole layer: a bias by rows is with the first member alone.
            names = [name for name, _ in layer.named_parameters(prefix=str(place))]
            self.places.update({name: (place << 32) + at for at, name in enumerate(names)})
            self._cuts.cut(place, layer)
            layer = layer.to(self._device)
            if self._narrow is not None:
                self._narrow.add(layer)
            self.built.append(layer)
            named = [
                (name, parameter)
                for name, parameter in layer.named_parameters(prefix=str(place))
                if parameter.requires_grad and parameter not in seen
            ]
            seen.update(parameter for _, parameter in named)
            yield place, named


def _check_values(place: int, layer: nn.Module) -> None:
    """Check that a layer has values to begin with.

    Raises:
        ConfigError: it is on the meta device.
    """
    named = (*layer.named_parameters(), *layer.named_buffers())
    if name := next((name for name, tensor in named if tensor.is_meta), ""):
        raise ConfigError(
            f"layer {place} ({type(layer).__name__}): {name} is on the meta device, without values "
            "to begin with; expected a module on the CPU, or an axrt.LayerSpec"
        )
