"""The choice of a schedule where the settings leave it open.

Policy "auto" simulates every policy on the run's own measured costs, and takes the fastest that
fits. Costs come from a microbatch that runs through every layer once (`model.costs`), latency and
bandwidth from messages that go there and back between two ranks. The spread of durations is taken
from the same measurements, since it separates policies that look alike on a steady machine.

With no policy named, nothing is measured: the first legal one of a short list is taken.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from axrt.config import AUTO, DEFAULTS, Config, Schedule
from axrt.copy_rates import Copies
from axrt.errors import ConfigError
from axrt.exchange import Exchange
from axrt.mesh import Mesh
from axrt.model.compiler import Compiler
from axrt.model.costs import kinds_of, measure
from axrt.model.layers import num_multiplied
from axrt.model.module import PipelineModule
from axrt.model.partition import OPERATIONS, busiest
from axrt.model.precision import types_of
from axrt.plan_from_costs import PLANNED, SentPlan, plan_for, work_of
from axrt.preflight import checked_sample, refuse_shared_parameters
from axrt.rank import Rank
from axrt.schedule import job_of
from axrt.scheduler.cost_table import CostTable, LayerCosts
from axrt.scheduler.job import Job
from axrt.scheduler.policies import CAPPED, FIXED, NAMES, Fixed, policy_by_name
from axrt.scheduler.recompute import recomputing
from axrt.scheduler.schedules import caps_of
from axrt.scheduler.shards import usual_group, with_shards
from axrt.scheduler.sharing import with_sharing
from axrt.scheduler.simulator import Costs, Edge, simulate

_STEPS = 3
_MOST_MICROBATCHES = 4  # times the ranks
TASK_S = 50e-6  # what the loop takes for a task, docs/performance.md
_AS_MUCH = 1.1  # work of the busiest rank, in that with one stage a rank
_AS_FAST = 1.01  # of candidates within this of the fastest, the one that holds least
_MIB = _LARGE = 2**20
_Found = tuple[Schedule, Job]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule with the figures that a simulation predicts for it.

    Args:
        schedule: settings of the schedule, its policy and cap filled in.
        step_s: seconds that a step takes.
        busy: share of them in which the busiest rank computes.
        held_mib: largest amount of activations that a rank holds, in MiB.
    """

    schedule: Schedule
    step_s: float
    busy: float
    held_mib: float

    def __str__(self) -> str:
        cap = f" max_held {self.schedule.max_held}" if self.schedule.max_held else ""
        return (
            f"{self.schedule.policy}{cap}: {self.step_s * 1e3:.1f} ms a step, busy "
            f"{self.busy:.2f}, {self.held_mib:.1f} MiB"
        )


_FREE = Copies()


def resolve(
    config: Config, model: PipelineModule, rank: Rank, sample: Any, compiler: Compiler | None
) -> tuple[Schedule, Job, list[str]]:
    """Fill in the policy that the settings leave open. Every rank calls it; the main one decides.

    Args:
        config: settings of the run.
        model: layers and loss, the same on every rank.
        rank: this rank.
        sample: a microbatch, (inputs, targets), which policy "auto" measures; only the main rank's
            counts.
        compiler: compiler that runs the layers; None: they run as they are.
    Returns:
        The settings of the schedule with its policy, its job for this model, and the candidates
        that "auto" has found, one text each.
    Raises:
        ConfigError: there is no sample, or no schedule fits; raised on every rank.
    """
    mesh, exchange, asked = rank.mesh, rank.exchange, config.schedule
    if asked.policy != AUTO and not asked.costs:
        return *settled(config, model, mesh), []
    known = _known if asked.costs else _measured
    costs = known(config, model, rank, sample, compiler)

    def decided() -> tuple[str, int, tuple[Any, ...] | None, list[str]]:
        policy, max_held, plan, texts = _decided(config, model, mesh, costs)
        return policy, max_held, plan and tuple(plan), texts

    policy, max_held, plan, candidates = exchange.agreed(decided)
    schedule = replace(asked, policy=policy, max_held=max_held, also=())
    if plan is None:
        schedule, job = _of(schedule, config, model, mesh.pipe)
    else:
        along = SentPlan(*plan)
        job = _for_model(along.job(), config, model, along.cuts)
    return schedule, _with_replicas(job, mesh, config), candidates


class _Known(NamedTuple):
    """Costs of a model; there are layers on the main rank alone.

    Args:
        layers: cost of each layer.
        edge: link between two ranks, in seconds and bytes.
        task_s: seconds that the loop takes for a task.
    """

    layers: Sequence[LayerCosts]
    edge: Edge
    task_s: float = TASK_S


def _known(
    config: Config, model: PipelineModule, rank: Rank, sample: Any, compiler: Compiler | None
) -> _Known:
    """The costs of the file that `schedule.costs` names, which the main rank reads."""

    layers: list[LayerCosts] = []

    def read() -> tuple[float, ...]:
        size = config.schedule.microbatch_size
        try:
            table = CostTable.read(Path(config.schedule.costs))
            layers.extend(table.of(size, kinds_of(model)))
        except ValueError as error:
            raise ConfigError(f"schedule.costs: {error}") from None
        return *table.edge, table.task_s

    latency, bandwidth, task_s = rank.exchange.agreed(read)
    return _Known(layers, Edge(latency, bandwidth), task_s)


def _measured(
    config: Config, model: PipelineModule, rank: Rank, sample: Any, compiler: Compiler | None
) -> _Known:
    """The costs of layers on the main rank, and of messages between it and another one."""
    layers: list[LayerCosts] = []
    exchange, generator, types = rank.exchange, rank.generator, types_of(config.precision)

    def measured() -> None:
        given = checked_sample(sample, "schedule.policy = 'auto' measures the layers")
        layers.extend(measure(model, config.run.seed, given, generator, types, compiler))

    with generator.borrowed():
        exchange.agreed(measured)
    several = rank.mesh.pipe * rank.mesh.data > 1
    return _Known(layers, measured_edge(exchange, generator.device) if several else Edge())


def _decided(
    config: Config, model: PipelineModule, mesh: Mesh, costs: _Known
) -> tuple[str, int, SentPlan | None, list[str]]:
    """Policy, cap, the plan that it follows if it does, and the candidates of "auto"."""
    asked = config.schedule
    if asked.policy != AUTO:
        schedule, _ = settled(config, model, mesh)
        return schedule.policy, schedule.max_held, _asked(schedule, config, model, mesh, costs), []
    found = choose(config, model, mesh.pipe, costs.layers, costs.edge)
    best, texts = found[0], [str(one) for one in found]
    if plan := _possible(config, model, mesh, costs):
        job = _for_model(plan.job(), config, model, plan.cuts)
        along = predicted(replace(asked, policy="adaptive"), job, costs.layers, costs.edge)
        if along.step_s * _AS_FAST < best.step_s:
            return "adaptive", asked.max_held, plan, [f"{along} along a plan", *texts]
    return best.schedule.policy, best.schedule.max_held, None, texts


def _asked(
    schedule: Schedule, config: Config, model: PipelineModule, mesh: Mesh, costs: _Known
) -> SentPlan | None:
    """The plan of a policy that the settings name, with costs; None for one rank."""
    if mesh.pipe == 1:
        return None
    why = ""
    if schedule.policy not in PLANNED:
        why = f"schedule.policy {schedule.policy!r} follows no plan; expected auto or one of "
        why += ", ".join(PLANNED)
    elif config.memory.recompute == AUTO:
        why = "memory.recompute = 'auto' settles the schedule anew; expected another value of it"
    if why:
        raise ConfigError(f"schedule.costs: {why}; or schedule.costs = ''")
    try:
        return _plan(schedule.policy, config, model, mesh, costs)
    except ValueError as error:
        raise ConfigError(f"schedule.costs: {error}") from None


def _possible(config: Config, model: PipelineModule, mesh: Mesh, costs: _Known) -> SentPlan | None:
    """The plan that "auto" may take; None where the run takes none."""
    if mesh.pipe == 1 or config.memory.recompute == AUTO:
        return None
    try:
        return _plan("adaptive", config, model, mesh, costs)
    except (ValueError, ConfigError):
        return None


def _plan(name: str, config: Config, model: PipelineModule, mesh: Mesh, costs: _Known) -> SentPlan:
    """The plan of a policy; raises where there is none, or the run takes no order."""
    plan = plan_for(config, name, model, mesh.pipe, *costs)
    _with_replicas(_for_model(plan.job(), config, model, plan.cuts), mesh, config)
    return plan


def settled(config: Config, model: PipelineModule, mesh: Mesh) -> tuple[Schedule, Job]:
    """The settings of the schedule with a policy that needs no measurement, and its job.

    Args:
        config: settings of the run; `schedule.policy` is not "auto".
        model: layers that the schedule cuts into stages.
        mesh: numbers of pipelines and replicas.
    Raises:
        ConfigError: the schedule does not fit the model or the ranks.
    """
    schedule, job = (
        _by_default(config, model, mesh.pipe)
        if config.schedule.policy == ""
        else _of(config.schedule, config, model, mesh.pipe)
    )
    return schedule, _with_replicas(job, mesh, config)


def _by_default(config: Config, model: PipelineModule, ranks: int) -> _Found:
    """The first of `DEFAULTS` that the model can be cut for, on the placement that is asked for if
    one is; one with a stage a rank where that leaves the busiest rank with less work."""
    asked = config.schedule.placement
    if ranks == 1 and asked in ("", "linear"):  # nobody to wait for, nothing to fill
        return _of(replace(config.schedule, policy="1f1b"), config, model, ranks)
    refusal, found = None, []
    for name, placement in DEFAULTS.items():
        takes_the_cap = not config.schedule.max_held or name == "adaptive"
        if asked in ("", placement) and takes_the_cap:
            try:
                found.append(_of(replace(config.schedule, policy=name), config, model, ranks))
            except ConfigError as error:
                refusal = error
    if not found:
        raise refusal or _no_default_takes_the_cap(config.schedule)
    return _well_balanced(found, config, model)


def _well_balanced(found: Sequence[_Found], config: Config, model: PipelineModule) -> _Found:
    """The first, unless one stage a rank leaves the busiest rank with a tenth less work."""
    first = found[0]
    if (config.parallel.partition or model.partition_method) != OPERATIONS:
        return first
    linear = next((one for one in found if one[1].placement.name == "linear"), first)
    weights = [num_multiplied(layer) for layer in model.layers]
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


def measured_edge(exchange: Exchange, device: torch.device) -> Edge:
    """The link between two ranks, in seconds and bytes, from the times of two sizes of message.
    Every rank calls it."""
    small_s, large_s = (
        exchange.round_trip_s(torch.zeros(size, dtype=torch.uint8, device=device)) / 2
        for size in (1, _LARGE)
    )
    return Edge(small_s, _LARGE / (large_s - small_s) if large_s > small_s else float("inf"))


def choose(
    config: Config, model: PipelineModule, ranks: int, layers: Sequence[LayerCosts], edge: Edge
) -> list[Candidate]:
    """Simulate all schedules that fit the settings and the memory.

    Args:
        config: settings; `schedule.placement`, `chunks` and `max_held` narrow the choice where they
            are set, and `memory.activations_mb` limits what a rank may hold.
        model: layers that the schedules cut into stages.
        ranks: number of ranks of a pipeline.
        layers: measured cost of each layer.
        edge: link between two ranks, in seconds and bytes.
    Returns:
        The candidates, the one to take first, then the others by their time. Of those within 1 % of
        the fastest, the one that holds least is taken.
    Raises:
        ConfigError: no schedule fits.
    """
    found = [
        predicted(schedule, job, layers, edge) for schedule, job in _legal(config, model, ranks)
    ]
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
            f"memory.activations_mb = {limit:g} is too little for any schedule on {ranks} ranks; "
            f"{least} holds least: set "
            f"memory.activations_mb = {ceil(least.held_mib + 0.1)}, {recompute}or start more ranks"
        )
    best = min(
        (one for one in fitting if one.step_s <= _AS_FAST * fitting[0].step_s),
        key=lambda one: one.held_mib,
    )
    return [best, *(one for one in fitting if one is not best)]


def _legal(config: Config, model: PipelineModule, ranks: int) -> Iterator[_Found]:
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
                found = _of(of, config, model, ranks)
            except ConfigError:
                continue
            if (
                found[1].pipes == 1 or asked.placement
            ):  # two pipes hold all weights twice, which is for the user to want
                yield found


def _with_replicas(job: Job, mesh: Mesh, config: Config) -> Job:
    of = config.memory
    group = of.shard if of.zero else config.parallel.group or usual_group(mesh.data, job.ranks)
    group = 0 if group == 1 or job.by_library else group
    job = replace(job, replicas=mesh.data)
    if config.schedule.share:
        job = _sharing(job, config)
        group = 0 if job.in_tree else group
    try:
        job = replace(job, held_on_device=of.offload_activations)
        job = with_shards(job, of.zero, of.reductions, of.gathered, group, of.offload_parameters)
    except ValueError as error:
        raise ConfigError(f"memory.{error}{_unnamed(job, config)}") from None
    return job


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


def of_one_replica(schedule: Schedule, config: Config, model: PipelineModule, ranks: int) -> Job:
    """The job of one replica, with the activations that leave its ranks; `schedule` has a policy
    that fits."""
    _, job = _of(schedule, config, model, ranks)
    return replace(job, held_on_device=config.memory.offload_activations)


def _of(schedule: Schedule, config: Config, model: PipelineModule, ranks: int) -> _Found:
    """A schedule with a policy, and its job for the model with one replica; raises `ConfigError`
    where it cannot be."""
    return schedule, _for_model(job_of(schedule, ranks), config, model)


def _for_model(
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
        slots=config.memory.slots if config.memory.comes_to_device else 0,
        host_rooms=config.memory.slots if config.memory.steps_on_host else 0,
        host_share=config.memory.host_share,
        speculates=config.speculates,
    )
    return recomputing(job, config.memory.recompute)


def predicted(
    schedule: Schedule,
    job: Job,
    layers: Sequence[LayerCosts],
    edge: Edge,
    copies: Copies = _FREE,
) -> Candidate:
    """The figures of a schedule by simulation.

    Args:
        schedule, job: the schedule, cut into stages.
        layers: measured cost of each layer.
        edge: link between two ranks, in seconds and bytes.
        copies: rates of copies of activations, where some leave the device.
    """
    stages = [layers[first:end] for first, end in pairwise(job.cuts)]

    def saved(stage: int) -> int:
        again = job.recomputed.get(stage, 0)
        return sum(layer.stash_bytes for layer in stages[stage][again:])

    costs = Costs(
        tuple(map(work_of, stages)),
        recomputed={stage: _share(stages[stage], count) for stage, count in job.recomputed.items()},
        offload=tuple([saved(stage) / copies.out for stage in range(job.stages)]),
        reload=tuple([saved(stage) / copies.into for stage in range(job.stages)]),
        task=TASK_S,
        edge=edge,
        jitter=median(layer.spread for layer in layers),
        pieces=4,
    )

    def simulated(microbatches: int) -> tuple[float, float]:
        line = simulate(replace(job, microbatches=microbatches), costs, steps=_STEPS)
        return line.makespan / _STEPS, max(line.stash(kept, recomputed))

    def kept(stage: int) -> float:
        count, first = job.recomputed.get(stage, 0), job.cuts[stage]
        came_in = layers[first - 1].sent_bytes if count and first else 0
        return (came_in + saved(stage)) / _MIB

    def recomputed(stage: int) -> float:
        return (
            sum(layer.stash_bytes for layer in stages[stage][: job.recomputed.get(stage, 0)]) / _MIB
        )

    given = isinstance(job.policy, Fixed)  # its order has that number of microbatches
    step_s, held_mib = (
        simulated(job.microbatches) if given else _at(job.microbatches, job.ranks, simulated)
    )
    return Candidate(
        schedule, step_s, job.microbatches * costs.of_busiest(job.placement) / step_s, held_mib
    )


def _at(
    microbatches: int, ranks: int, simulated: Callable[[int], tuple[float, float]]
) -> tuple[float, float]:
    """The time and memory of a long step, on a straight line through two shorter ones: its middle
    repeats itself."""
    shorter, longer = 2 * ranks, _MOST_MICROBATCHES * ranks
    if microbatches <= longer:
        return simulated(microbatches)
    far = (microbatches - longer) / (longer - shorter)
    (step_s, stash), (less_s, less) = simulated(longer), simulated(shorter)
    return step_s + far * (step_s - less_s), stash + far * (stash - less)


def _share(layers: Sequence[LayerCosts], count: int) -> float:
    """The share of a stage's forward that its first layers take."""
    whole = sum(layer.forward_s for layer in layers)
    return sum(layer.forward_s for layer in layers[:count]) / whole if whole else 0.0
