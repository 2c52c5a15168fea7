"""The plan of a run that names no policy and has a sample.

The layers are measured, and the run follows a plan for what they take, where that is faster than
the row of a table that it had without a sample (`default_schedule`). The plan keeps the placement
and the cuts of that row, so no measurement decides which weights a rank holds. The cap grows where
that is worth it and every rank has the memory.
"""

import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from axrt.config import Config
from axrt.device.device import free_memory, identity
from axrt.model.module import PipelineModule
from axrt.runtime.rank import Rank
from axrt.scheduler.job import Job
from axrt.scheduler.simulation.model_costs import ModelCosts
from axrt.world.mesh import Mesh

from .default_schedule import settled
from .model_job import Found, filling, job_for, job_with
from .plan_from_costs import Decided, SentPlan, possible_plan
from .step_prediction import AS_FAST, Candidate, predicted

# No policy and a sample means a plan. The rows of a table know neither the layers nor the link.
# `auto` stays what tries every policy. The plan keeps placement and cuts of the row, else a
# measurement would decide which weights a rank holds, and a run that goes on would be cut anew. Its
# cap grows only into a tenth of the memory that would be left, because a run that fitted before
# must not run out of it now. It is predicted for one replica, as `auto` predicts, since residencies
# of shards are planned for all microbatches of a step. Only a row of `adaptive` is planned: its
# settings name a cap, from which memory is predicted once more at the start. Where the user has set
# a limit of memory, no rank holds more than under the row. A step whose plan would take long keeps
# the row: nobody asked for the wait.
_LARGEST = 128  # ranks times microbatches; plans of more take long for a start nobody asked for
_MORE = (3, 4)  # caps, times the ranks; 2 is the policy's own
_WORTH = 1.02  # a larger cap makes steps so much faster; costs that are measured vary by about that
_OF_FREE = 0.1  # share of the memory left that more activations may take
_STATE_BYTES = 18  # of a parameter with Adam: narrow weights and gradients, masters and moments
_MIB = 2**20

Option = tuple[Candidate, SentPlan | None]  # what is predicted; the plan, or None for the row


def is_open(config: Config, model: PipelineModule, rank: Rank, sample: Any) -> bool:
    """A run of these settings follows a plan for what its layers take. Every rank calls it; only
    the main rank's sample counts."""
    return takes_a_plan(config, model, rank.mesh) and rank.exchange.agreed(
        lambda: sample is not None
    )


def takes_a_plan(config: Config, model: PipelineModule, mesh: Mesh) -> bool:
    """A run of these settings follows a plan if there is a sample.

    Raises:
        ConfigError: the schedule does not fit the model or the ranks.
    """
    of = config.schedule
    left_open = not (of.policy or of.chunks or of.share or config.run.compile)
    return (
        left_open
        and config.parallel.virtual_members
        == 1  # of a team the row stays: what plans gain it is not measured
        and mesh.pipe > 1
        and is_brief(of.microbatches, mesh)
        and settled(config, model, mesh)[0].policy == "adaptive"
    )


def is_brief(microbatches: int, mesh: Mesh) -> bool:
    """Several plans are made in a few seconds."""
    return mesh.pipe * microbatches <= _LARGEST


def free_bytes(rank: Rank) -> float:
    """Bytes that are free for the rank with the fewest, on the main rank; 0 on others. Ranks of a
    device share what it has. Every rank calls it."""
    where = (socket.gethostname(), identity(rank.device))
    found = rank.exchange.gathered((where, free_memory(rank.device)))
    if not found:
        return 0.0
    sharing = Counter(where for where, _ in found)
    return min(float(free / sharing[where]) for where, free in found)


def decided(
    config: Config, model: PipelineModule, mesh: Mesh, costs: ModelCosts, free: float
) -> Decided:
    """The row, or a plan that is faster, in a simulation of one replica.

    Args:
        free: bytes that are free for each rank, before it has weights.
    Returns:
        The row, unless plans are faster: over 1 % with its cap, over 2 % more with a larger one.
    """
    schedule, job = job_with(settled(config, model, mesh)[0], config, model, mesh.pipe)
    row = predicted(schedule, job, costs)
    room = _room(config, row, job, costs, free)
    best: Option = row, None
    options = [best]
    for option in _planned(config, model, mesh, costs, (schedule, job), max(room) > 0):
        one = option[0]
        limits = [had + more for had, more in zip(row.held, room, strict=True)]
        fits = all(held <= limit for held, limit in zip(one.held, limits, strict=True))
        grows = one.schedule.max_held != schedule.max_held
        options += [option] * fits
        if fits and one.step_s * (_WORTH if grows else AS_FAST) < best[0].step_s:
            best = option
        elif grows:  # still larger ones gain less, or do not fit
            break
    others = sorted((of for of in options if of is not best), key=lambda of: of[0].step_s)
    texts = [f"{one}{' along a plan' if plan else ''}" for one, plan in (best, *others)]
    return Decided(best[0].schedule.policy, best[0].schedule.max_held, best[1], texts)


def _room(
    config: Config, row: Candidate, job: Job, costs: ModelCosts, free: float
) -> Sequence[float]:
    """MiB that each rank may hold beside those of the row: none where the user has set limits that
    a prediction before the run keeps to."""
    memory = config.memory
    if memory.activations_mb or memory.device_gb or memory.offload_activations:
        return [0.0] * job.ranks
    parameters = [
        sum(layer.parameters for layer in costs.layers[first:end])
        for first, end in pairwise(job.cuts)
    ]
    state = [sum(parameters[stage] for stage in held) for held in job.placement.held]
    return [
        _OF_FREE * max(0.0, (free - _STATE_BYTES * number) / _MIB - had)
        for number, had in zip(state, row.held, strict=True)
    ]


def _planned(
    config: Config,
    model: PipelineModule,
    mesh: Mesh,
    costs: ModelCosts,
    row: Found,
    may_grow: bool,
) -> Iterator[Option]:
    """Plans on the stages of the row: with the cap that is asked for or the policy's own, and with
    larger ones if nothing is asked for."""
    schedule, job = row
    at = replace(
        config,
        schedule=replace(schedule, placement=job.placement.name),
        parallel=replace(config.parallel, partition=job.cuts),
        memory=replace(config.memory, activations_mb=0.0),
    )
    yield from plans(at, model, mesh, costs, may_grow and not schedule.max_held)


def plans(
    config: Config, model: PipelineModule, mesh: Mesh, costs: ModelCosts, may_grow: bool
) -> Iterator[tuple[Candidate, SentPlan]]:
    """Plans of `adaptive`, each with what is predicted for it: with the cap that the settings say,
    or its own; then, if the cap may grow, with larger ones that bind."""
    all_of_them = 2 * config.schedule.microbatches  # a cap counts chunks, and a vee has two a rank
    larger = [times * mesh.pipe for times in _MORE if (times - 1) * mesh.pipe < all_of_them]
    for cap in (config.schedule.max_held, *(larger if may_grow else ())):
        of = replace(config.schedule, policy="adaptive", max_held=cap, also=())
        plan = possible_plan(replace(config, schedule=of), model, mesh, costs)
        if plan is not None:
            job = filling(job_for(plan.job(), config, model, plan.cuts), config)
            yield predicted(of, job, costs), plan
