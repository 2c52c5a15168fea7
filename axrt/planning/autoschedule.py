"""The choice of a schedule where the settings leave it open.

Policy "auto" simulates every policy on the run's own measured costs (`known_costs`), and takes the
fastest that fits. With no policy named the run has a row of a table (`default_schedule`), and with
a sample a plan on the stages of that row (`default_plan`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import ceil
from typing import Any, NamedTuple

from axrt.config import AUTO, Config, Schedule
from axrt.errors import ConfigError
from axrt.model.compiler import Compiler
from axrt.model.module import PipelineModule
from axrt.planning import default_plan
from axrt.runtime.rank import Rank
from axrt.scheduler.job import Job
from axrt.scheduler.plural import plural
from axrt.scheduler.policies import NAMES, policy_by_name
from axrt.scheduler.sharing import with_sharing
from axrt.scheduler.simulation.model_costs import ModelCosts
from axrt.scheduler.simulation.schedules import caps_of
from axrt.world.mesh import Mesh

from .default_schedule import settled
from .known_costs import costs_in_file, measured_costs
from .model_job import Found, filling, job_for, job_with, with_replicas
from .plan_from_costs import PLANNED, Decided, SentPlan, plan_of_run
from .step_prediction import AS_FAST, Candidate, predicted


class Resolved(NamedTuple):
    """The schedule of a run."""

    schedule: Schedule  # settings of the schedule with its policy
    job: Job  # its job for the model
    candidates: Sequence[str] = ()  # what was simulated, one text each, the chosen one first
    notes: Sequence[str] = ()  # lines for the user about what was left undone


def resolve(
    config: Config, model: PipelineModule, rank: Rank, sample: Any, compiler: Compiler | None
) -> Resolved:
    """Fill in the policy that the settings leave open. Every rank calls it; the main one decides.

    Args:
        sample: a microbatch, (inputs, targets), to measure; only the main rank's counts. None:
            policy "auto" is refused, and a run that names no policy has one without measurement.
        compiler: compiler that runs the layers; None: they run as they are.
    Raises:
        ConfigError: there is no sample, or no schedule fits; raised on every rank.
    """
    mesh, asked = rank.mesh, config.schedule
    if asked.costs:
        costs = costs_in_file(config, model, rank)
        found = _on(costs, config, model, rank, _decided)
        alone = "schedule.costs does nothing: a pipeline of one rank follows no plan"
        return found._replace(notes=[alone] if mesh.pipe == 1 and asked.policy != AUTO else [])
    if asked.policy == AUTO:
        costs = measured_costs(config, model, rank, sample, compiler)
        return _on(costs, config, model, rank, _decided)
    if default_plan.is_open(config, model, rank, sample):
        return _by_default(config, model, rank, sample)
    return Resolved(*settled(config, model, mesh))


def _by_default(config: Config, model: PipelineModule, rank: Rank, sample: Any) -> Resolved:
    """A plan for what layers take; the row of the table where they do not run alone."""
    free = default_plan.free_bytes(rank)
    try:
        costs = measured_costs(config, model, rank, sample, None)
    except ConfigError as error:
        note = f"the schedule is not planned for what layers take, since none is measured: {error}"
        return Resolved(*settled(config, model, rank.mesh), notes=[note])
    return _on(costs, config, model, rank, partial(default_plan.decided, free=free))


def _on(
    costs: ModelCosts,
    config: Config,
    model: PipelineModule,
    rank: Rank,
    decide: Callable[..., Decided],
) -> Resolved:
    """The schedule that the main rank decides on, from known costs; every rank calls it."""

    def decided() -> tuple[str, int, tuple[Any, ...] | None, list[str]]:
        found = decide(config, model, rank.mesh, costs)
        return (
            found.policy,
            found.max_held,
            found.plan and tuple(found.plan),
            list(found.candidates),
        )

    policy, max_held, plan, candidates = rank.exchange.agreed(decided)
    schedule = replace(config.schedule, policy=policy, max_held=max_held, also=())
    if plan is None:
        schedule, job = job_with(schedule, config, model, rank.mesh.pipe)
    else:
        along = SentPlan(*plan)
        job = job_for(along.job(), config, model, along.cuts)
    return Resolved(schedule, with_replicas(job, rank.mesh, config), candidates)


def _decided(config: Config, model: PipelineModule, mesh: Mesh, costs: ModelCosts) -> Decided:
    """What "auto" chooses, and what a policy that is named follows on costs of a file."""
    asked = config.schedule
    if asked.policy != AUTO:
        schedule, _ = settled(config, model, mesh)
        plan = _asked(schedule, config, model, mesh, costs)
        return Decided(schedule.policy, schedule.max_held, plan)
    found = choose(config, model, mesh.pipe, costs)
    best, plan = found[0], None
    texts = [str(one) for one in found]
    memory = config.memory
    limits = (asked.max_held, memory.activations_mb, memory.device_gb, memory.offload_activations)
    may_grow = not any(limits) and default_plan.is_brief(asked.microbatches, mesh)
    for along, its_plan in default_plan.plans(config, model, mesh, costs, may_grow):
        if along.step_s * AS_FAST < best.step_s:
            best, plan = along, its_plan
            texts.insert(0, f"{along} along a plan")
    return Decided(best.schedule.policy, best.schedule.max_held, plan, texts)


def _asked(
    schedule: Schedule, config: Config, model: PipelineModule, mesh: Mesh, costs: ModelCosts
) -> SentPlan | None:
    """The plan of a policy that the settings name, with costs; None for one rank."""
    if mesh.pipe == 1:
        return None
    why = ""
    if schedule.policy not in PLANNED:
        why = f"schedule.policy {schedule.policy!r} follows no plan; expected auto or one of "
        why += ", ".join(PLANNED)
    if why:
        raise ConfigError(f"schedule.costs: {why}; or schedule.costs = ''")
    try:
        return plan_of_run(schedule.policy, config, model, mesh, costs)
    except ValueError as error:
        raise ConfigError(f"schedule.costs: {error}") from None


def choose(config: Config, model: PipelineModule, ranks: int, costs: ModelCosts) -> list[Candidate]:
    """Simulate all schedules that fit the settings and the memory.

    Args:
        config: settings; `schedule.placement`, `chunks` and `max_held` narrow the choice where they
            are set, and `memory.activations_mb` limits what a rank may hold.
    Returns:
        The candidates, the one to take first, then the others by their time. Of those within 1 % of
        the fastest, the one that holds least is taken.
    Raises:
        ConfigError: no schedule fits.
    """
    found = [predicted(schedule, job, costs) for schedule, job in _legal(config, model, ranks)]
    limit = config.memory.activations_mb or float("inf")
    fitting = sorted((one for one in found if one.held_mib <= limit), key=lambda one: one.step_s)
    if not fitting:
        least = min(found, key=lambda one: one.held_mib, default=None)
        if least is None:
            raise ConfigError(
                f"schedule.policy = 'auto' finds no schedule for {ranks} ranks that fits the model "
                "and [schedule]"
            )
        recompute = "memory.recompute = 'full', " if config.memory.recompute == "none" else ""
        raise ConfigError(
            f"memory.activations_mb = {limit:g} is too little for any schedule on "
            f"{plural(ranks, 'rank')}; {least} holds least: set memory.activations_mb = "
            f"{ceil(least.held_mib + 0.1)}, {recompute}or start more ranks"
        )
    best = min(
        (one for one in fitting if one.step_s <= AS_FAST * fitting[0].step_s),
        key=lambda one: one.held_mib,
    )
    return [best, *(one for one in fitting if one is not best)]


def _legal(config: Config, model: PipelineModule, ranks: int) -> Iterator[Found]:
    """The schedules that fit, each with its job."""
    asked = config.schedule
    for name in asked.also:
        try:
            policy_by_name(name)
        except ValueError as error:
            raise ConfigError(f"schedule.also: {error}") from None
    for name in (*NAMES, *asked.also):
        for cap in [asked.max_held] if asked.max_held else caps_of(name, ranks):
            try:
                of = replace(asked, policy=name, max_held=cap, also=())
                schedule, job = job_with(of, config, model, ranks)
            except ConfigError:
                continue
            # Two pipes hold all weights twice, which is for the user to want.
            if (job.placement.pipes == 1 or asked.placement) and _may_share(job, config):
                yield schedule, filling(job, config)


def _may_share(job: Job, config: Config) -> bool:
    """Replicas can share microbatches under a schedule, where the settings ask for that."""
    if config.schedule.share:
        try:
            with_sharing(replace(job, replicas=2), config.run.deterministic)
        except ValueError:
            return False
    return True
