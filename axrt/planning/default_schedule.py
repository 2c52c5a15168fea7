"""The schedule of a run that names no policy and has no sample: the first row of a short table that
the model can be cut for."""

from collections.abc import Sequence
from dataclasses import replace

from axrt.config import DEFAULTS, Config, Schedule
from axrt.errors import ConfigError
from axrt.model.layers import counted, num_multiplied
from axrt.model.module import PipelineModule
from axrt.model.partition import OPERATIONS
from axrt.scheduler.job import Job
from axrt.scheduler.planning.balance import busiest
from axrt.scheduler.policies import CAPPED, FIXED, policy_by_name
from axrt.world.mesh import Mesh

from .model_job import Found, job_with, with_replicas

_AS_MUCH = 1.1  # work of the busiest rank, in that with one stage a rank


def settled(config: Config, model: PipelineModule, mesh: Mesh) -> tuple[Schedule, Job]:
    """The settings of the schedule with a policy that needs no measurement, and its job.

    Args:
        config: settings of the run; `schedule.policy` is not "auto".
    Raises:
        ConfigError: the schedule does not fit the model or the ranks.
    """
    schedule, job = (
        _row(config, model, mesh.pipe)
        if config.schedule.policy == ""
        else job_with(config.schedule, config, model, mesh.pipe)
    )
    return schedule, with_replicas(job, mesh, config)


def _row(config: Config, model: PipelineModule, ranks: int) -> Found:
    """The schedule of one replica where the settings name no policy.

    It is the first of `DEFAULTS` that the model can be cut for, on the placement that is asked for
    if one is; one with a stage a rank where that leaves the busiest rank with less work.

    Raises:
        ConfigError: none fits the model, the ranks and the cap.
    """
    asked = config.schedule.placement
    if ranks == 1 and asked in ("", "linear"):  # nobody to wait for, nothing to fill
        return job_with(replace(config.schedule, policy="1f1b"), config, model, ranks)
    refusal, found = None, []
    for name, placement in DEFAULTS.items():
        takes_the_cap = not config.schedule.max_held or name == "adaptive"
        if asked in ("", placement) and takes_the_cap:
            try:
                found.append(job_with(replace(config.schedule, policy=name), config, model, ranks))
            except ConfigError as error:
                refusal = error
    if not found:
        raise refusal or _no_default_takes_the_cap(config.schedule)
    return _well_balanced(found, config, model)


def _well_balanced(found: Sequence[Found], config: Config, model: PipelineModule) -> Found:
    """The first, unless one stage a rank leaves the busiest rank with a tenth less work."""
    first = found[0]
    if (config.parallel.partition or model.partition_method) != OPERATIONS:
        return first
    linear = next((one for one in found if one[1].placement.name == "linear"), first)
    weights = counted(model.layers, num_multiplied)
    work, least = (busiest(weights, job.cuts, job.placement.held) for _, job in (first, linear))
    return first if work <= _AS_MUCH * least else linear


def _no_default_takes_the_cap(asked: Schedule) -> ConfigError:
    fitting = [
        name
        for name in CAPPED
        if name != FIXED and asked.placement in policy_by_name(name).placements
    ]
    others = " or ".join(f"schedule.policy = {name!r}" for name in fitting)
    return ConfigError(
        f"schedule.max_held = {asked.max_held} on schedule.placement = {asked.placement!r} with "
        "no policy named; expected "
        "schedule.max_held = 0, or "
        f"{others or 'another placement: no policy of this one takes a cap'}"
    )
