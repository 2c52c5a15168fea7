"""`adaptive`, `zb-h1` and `zb-h2` on known costs: from costs of layers to a plan, and from a plan
to the job of a run.

The main rank makes the plan. All ranks follow it, so it travels as text.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import ceil
from typing import NamedTuple

from axrt.config import Config
from axrt.errors import ConfigError
from axrt.model.module import PipelineModule
from axrt.model.partition import OPERATIONS
from axrt.scheduler.job import Job
from axrt.scheduler.order import Order
from axrt.scheduler.placement import Placement, placement_by_name
from axrt.scheduler.planning.balance import evened
from axrt.scheduler.planning.plan_choice import Trial, job_along_plan
from axrt.scheduler.planning.planner import Effort, World
from axrt.scheduler.planning.residency_planner import plan_residencies
from axrt.scheduler.plural import plural
from axrt.scheduler.policies import AlongPlan
from axrt.scheduler.simulation.cost_table import LayerCosts
from axrt.scheduler.simulation.model_costs import ModelCosts, world_of
from axrt.world.mesh import Mesh

from .model_job import job_for, with_replicas


class _Own(NamedTuple):
    """What a policy has of its own."""

    placements: tuple[str, ...]  # names of those that it may take
    # times, less: what a rank of p may keep: times x p - less microbatches
    times: int
    less: int = 0


PLANNED = {  # policies that follow a plan
    "adaptive": _Own(("linear", "vee"), 1),
    "zb-h1": _Own(("linear",), 1),
    "zb-h2": _Own(("linear",), 2, 1),
}


# what a start may take: seconds, and a minute for 16 ranks and 128 microbatches
AT_START, BRIEF = Effort(moves=5, work=3_000_000), Trial(steps=3, seeds=3, orders=4)


class SentPlan(NamedTuple):
    """A plan as it travels."""

    name: str  # policy that follows it
    placement: str  # name of the placement
    order: str  # the order as text, see `scheduler.order`
    cap: int  # chunks that a rank may hold; 0: what the order needs
    strict: bool  # True if no task runs ahead
    cuts: tuple[int, ...]  # indices of the layers at which stages begin, then the number of layers

    @classmethod
    def of(cls, job: Job, name: str, cuts: Sequence[int]) -> "SentPlan":
        """The plan that a job follows."""
        along = job.policy
        assert isinstance(along, AlongPlan)
        where = job.placement.name
        return cls(name, where, str(along.order), along.cap, along.strict, tuple(cuts))

    def job(self) -> Job:
        """The schedule that follows it, of no model yet."""
        order = Order.parse(self.order, self.placement)
        along = AlongPlan(order, order.needs, self.cap, self.strict, self.name)
        return Job(order.placement, along, order.microbatches)


class Decided(NamedTuple):
    """What the main rank has decided on known costs."""

    policy: str  # name of the policy
    max_held: int  # its cap; 0: its own
    plan: SentPlan | None  # the plan that is followed; None: the policy decides by itself
    candidates: Sequence[str] = ()  # what was simulated, one text each, the chosen one first


def plan_for(
    config: Config, name: str, model: PipelineModule, ranks: int, costs: ModelCosts
) -> SentPlan:
    """The plan of a policy on known costs.

    Args:
        config: settings of the run; `schedule.placement` and `max_held` and
            `memory.activations_mb` narrow the choice where they are set.
        name: one of `PLANNED`.
    Raises:
        ValueError, ConfigError: no placement fits, or no order keeps so little.
    """
    costs = costs.waiting()  # an order has whole tasks
    cuts = dict(_cuts(config, name, model, ranks, costs.layers))
    among = [world_of(where, of, costs.unsteady()) for where, of in cuts.items()]
    if not among:
        raise ValueError(f"policy {name} finds no placement that the model can be cut for")
    limit, least = _limit(config, name, ranks, among), min(world.least for world in among)
    if limit < least:  # only then is it that of the settings
        raise ConfigError(
            f"memory.activations_mb = {config.memory.activations_mb:g} is too little for any order "
            f"of {name} on {plural(ranks, 'rank')}; expected {ceil(10 * least / 2**20) / 10:g} or "
            "more"
        )
    of = config.schedule.microbatches
    job = job_along_plan(
        among, of, limit, partial(_as_in_run, config), effort=AT_START, trial=BRIEF
    )
    return SentPlan.of(job, name, cuts[job.placement])


def _as_in_run(config: Config, job: Job) -> Job:
    """A schedule with what else the run has that an order may not go with; raises `ValueError`
    where it does not."""
    of = config.memory
    if (of.zero > 2 or of.offload_parameters) and of.gathered < job.placement.chunks:
        plan_residencies(job, of.gathered)
    return replace(job, votes=config.votes, held_on_device=of.offload_activations)


def _cuts(
    config: Config, name: str, model: PipelineModule, ranks: int, layers: Sequence[LayerCosts]
) -> Iterator[tuple[Placement, Sequence[int]]]:
    """Placements that a policy may take, and where the model is cut for them.

    Where it would be cut by the operations of layers, their times are known better.
    """
    asked = config.schedule
    by_time = (config.parallel.partition or model.partition_method) == OPERATIONS
    seconds = [layer.forward_s + layer.input_s + layer.weight_s for layer in layers]
    for placement in PLANNED[name].placements:
        if asked.placement not in ("", placement):
            continue
        where = placement_by_name(placement, ranks, 0)
        if asked.chunks not in (0, where.chunks):
            continue
        with suppress(ConfigError):  # the model has too few layers
            cuts = model.boundaries(where.stages, config.parallel.partition, where.held)
            yield where, evened(seconds, cuts, where.held) if by_time else cuts


def _limit(config: Config, name: str, ranks: int, among: Sequence[World]) -> float:
    """Bytes that a rank may keep: the least of what is asked for; else what the policy's own
    microbatches keep on the placement that needs least for them."""
    microbatches = PLANNED[name].times * ranks - PLANNED[name].less
    if config.schedule.max_held:
        microbatches = max(1, config.schedule.max_held // (2 if name == "adaptive" else 1))
    limit = microbatches * min(world.least for world in among)
    if not config.memory.activations_mb:
        return limit
    bytes_asked = config.memory.activations_mb * 2**20
    return min(limit, bytes_asked) if config.schedule.max_held else bytes_asked


def plan_of_run(
    name: str, config: Config, model: PipelineModule, mesh: Mesh, costs: ModelCosts
) -> SentPlan:
    """The plan of a policy, which the run can follow.

    Args:
        name: one of `PLANNED`.
    Raises:
        ValueError, ConfigError: there is none, or the run takes no order.
    """
    plan = plan_for(config, name, model, mesh.pipe, costs)
    with_replicas(job_for(plan.job(), config, model, plan.cuts), mesh, config)
    return plan


def possible_plan(
    config: Config, model: PipelineModule, mesh: Mesh, costs: ModelCosts
) -> SentPlan | None:
    """The plan of `adaptive`, see `plan_of_run`; None where the run takes none."""
    if mesh.pipe == 1:
        return None
    try:
        return plan_of_run("adaptive", config, model, mesh, costs)
    except (ValueError, ConfigError):
        return None
