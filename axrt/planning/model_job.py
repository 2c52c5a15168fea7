"""The job of a model: a schedule with the model's cuts and what the settings ask of it."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from axrt.config import Config, Schedule
from axrt.errors import ConfigError
from axrt.model.joints import Team
from axrt.model.module import PipelineModule
from axrt.model.preflight import refuse_shared_parameters
from axrt.model.team_layers import TeamLayers
from axrt.scheduler.job import Job
from axrt.scheduler.numbering import StageJoints
from axrt.scheduler.planning.filling import fills
from axrt.scheduler.planning.recompute import recomputing
from axrt.scheduler.planning.shards import usual_group, with_shards
from axrt.scheduler.rules.offload import SLOTS
from axrt.scheduler.sharing import with_sharing
from axrt.world.mesh import Mesh

from .schedule import job_of

Found = tuple[Schedule, Job]  # a schedule with a policy, and its job


def job_with(schedule: Schedule, config: Config, model: PipelineModule, ranks: int) -> Found:
    """A schedule with a policy, and its job for the model with one replica; raises `ConfigError`
    where it cannot be."""
    return schedule, job_for(job_of(schedule, ranks), config, model)


def job_for(
    job: Job, config: Config, model: PipelineModule, cuts: Sequence[int] | None = None
) -> Job:
    """The job for the model, cut where it is said, or as the settings say."""
    cuts = cuts or model.boundaries(job.stages, config.parallel.partition, job.placement.held)
    refuse_shared_parameters(model, list(cuts))
    job = replace(
        job,
        cuts=tuple(cuts),
        votes=config.votes,
        by_library=config.parallel.collectives == "library",
        slots=SLOTS if config.memory.comes_to_device else 0,
        host_slots=SLOTS if config.memory.steps_on_host else 0,
        lag=config.refresh_lag,
        preconditions=config.optimizer.preconditions,
        team=config.parallel.tensor,
        joints=_joints(model, cuts, config.parallel.tensor) if config.parallel.tensor > 1 else {},
    )
    return recomputing(job, config.memory.recompute)


def _joints(model: PipelineModule, cuts: Sequence[int], size: int) -> dict[int, StageJoints]:
    """The joints of each stage that has any."""
    of_team = TeamLayers(model.tensor, Team(0, size))
    last = len(cuts) - 2
    counts = [
        of_team.joints(first, model.layers[first:end], stage == last)
        for stage, (first, end) in enumerate(pairwise(cuts))
    ]
    return {stage: StageJoints(count, count) for stage, count in enumerate(counts) if count}


def with_replicas(job: Job, mesh: Mesh, config: Config) -> Job:
    of = config.memory
    usual = 0 if of.zero else usual_group(mesh.data, job.ranks)
    group = config.parallel.group or usual
    group = 0 if group == 1 or job.by_library else group
    job = replace(filling(job, config), replicas=mesh.data)
    if config.schedule.share:
        job = _sharing(job, config)
        group = 0 if job.in_tree else group
    try:
        job = replace(job, held_on_device=of.offload_activations)
        job = with_shards(job, of.zero, of.reductions, of.gathered, group, of.offload_parameters)
    except ValueError as error:
        raise ConfigError(f"memory.{error}{_unnamed(job, config)}") from None
    return job


def filling(job: Job, config: Config) -> Job:
    """The same with what `schedule.fill` comes to."""
    fill = config.schedule.fill
    return replace(job, fills=fills(job) if fill == "auto" else fill == "always")


def _sharing(job: Job, config: Config) -> Job:
    try:
        return with_sharing(job, config.run.deterministic)
    except ValueError as error:
        raise ConfigError(f"schedule.{error}{_unnamed(job, config)}") from None


def _unnamed(job: Job, config: Config) -> str:
    """The end of an error of a policy that nobody has named."""
    if config.schedule.policy == job.policy.name:
        return ""
    return f"; schedule.policy names none, and {job.policy.name!r} was taken"
