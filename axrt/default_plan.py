"""The plan of a run that names no policy and has a sample.

The layers are measured, and the run follows a plan for what they take, where that is faster than
the row of a table that it had without a sample (`default_schedule`). The plan keeps the placement
and the cuts of that row, so no measurement decides which weights a rank holds. The cap grows where
that is worth it and the memory is there.
"""

import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from axrt.config import AUTO, Config
from axrt.default_schedule import row
from axrt.device import free_memory, identity
from axrt.known_costs import KnownCosts, measured_edge, measured_layers
from axrt.mesh import Mesh
from axrt.model.module import PipelineModule
from axrt.model_job import job_for
from axrt.plan_from_costs import Decided, SentPlan, possible_plan
from axrt.rank import Rank
from axrt.scheduler.cost_table import LayerCosts
from axrt.scheduler.job import Job
from axrt.step_prediction import AS_FAST, Candidate, predicted

_TASKS = 256  # ranks times microbatches: a plan of more takes too long for a start nobody asked for
_MORE = (3, 4)  # caps, times half of what the policy holds by itself
_OF_FREE = 0.1  # share of the memory left that more activations may take
_STATE_BYTES = 18  # of a parameter with Adam: narrow weights and gradients, masters and moments
_MIB = 2**20


Planned = tuple[Candidate, SentPlan | None]  # what is predicted, and the plan; None: of the row


def is_open(config: Config, model: PipelineModule, rank: Rank, sample: Any) -> bool:
    """A run of these settings follows a plan for what its layers take. Every rank calls it; only
    the main rank's sample counts."""
    return takes_a_plan(config, model, rank.mesh) and rank.exchange.agreed(
        lambda: sample is not None
    )


def takes_a_plan(config: Config, model: PipelineModule, mesh: Mesh) -> bool:
    """A run of these settings follows a plan if there is a sample."""
    asked = config.schedule
    return (
        asked.policy == ""
        and 1 < mesh.pipe <= _TASKS // asked.microbatches
        and not (asked.chunks or config.run.compile or config.memory.recompute == AUTO)
        and row(config, model, mesh.pipe)[0].policy == "adaptive"
    )


def measured(
    config: Config, model: PipelineModule, rank: Rank, sample: Any
) -> tuple[KnownCosts | None, str]:
    """The costs of layers, with them on the main rank alone, and of messages. Every rank calls it.

    Returns:
        None, and why, where the layers do not run alone: the run goes on without.
    """
    layers: list[LayerCosts] = []

    def tried() -> str:
        try:
            layers.extend(measured_layers(config, model, rank, sample, None))
        except Exception as error:  # of the user's layers, whatever it is
            return f"{type(error).__name__}: {error}"
        return ""

    with rank.generator.borrowed():
        why = rank.exchange.agreed(tried)
    if why:
        return None, why
    return KnownCosts(layers, measured_edge(rank.exchange, rank.device)), ""


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
    config: Config, model: PipelineModule, mesh: Mesh, costs: KnownCosts, free: float
) -> Decided:
    """The fastest of the row and of plans, in a simulation of one replica.

    Args:
        config: settings of the run, which `takes_a_plan`.
        model: layers that the schedule cuts into stages.
        mesh: numbers of pipelines and replicas.
        costs: what was measured.
        free: bytes that are free for each rank, before it has weights.
    Returns:
        Of what fits and is within 1 % of the fastest, the one that holds least.
    """
    by_row = row(config, model, mesh.pipe)
    by_itself = predicted(*by_row, costs.layers, costs.edge)
    state_mib = _STATE_BYTES * _parameters_of_fullest(by_row[1], costs.layers) / _MIB
    left_mib = max(0.0, free / _MIB - state_mib - by_itself.held_mib)
    most_mib = by_itself.held_mib + _OF_FREE * left_mib
    planned = _planned(config, model, mesh, costs, by_row[1], most_mib)
    found: list[Planned] = sorted([(by_itself, None), *planned], key=lambda of: of[0].step_s)
    as_fast = [of for of in found if of[0].step_s <= AS_FAST * found[0][0].step_s]
    best = min(as_fast, key=lambda of: of[0].held_mib)
    ordered = [best, *(of for of in found if of is not best)]
    texts = [f"{one}{' along a plan' if plan else ''}" for one, plan in ordered]
    schedule, plan = best[0].schedule, best[1]
    return Decided(schedule.policy, schedule.max_held, plan, texts)


def _planned(
    config: Config,
    model: PipelineModule,
    mesh: Mesh,
    costs: KnownCosts,
    job: Job,
    most_mib: float,
) -> Iterator[Planned]:
    """Plans where a job has its stages: with the cap that is asked for or the policy's own, and
    with larger ones if nothing is asked for and they fit."""
    parallel = replace(config.parallel, partition=job.cuts)
    named = replace(config.schedule, policy="adaptive")
    is_given = named.max_held or config.memory.activations_mb or config.memory.device_gb
    larger = () if is_given else [halves * mesh.pipe for halves in _MORE]
    for cap in (named.max_held, *larger):
        schedule = replace(named, max_held=cap)
        where = replace(schedule, placement=job.placement.name)
        plan = possible_plan(replace(config, schedule=where, parallel=parallel), model, mesh, costs)
        if plan is not None:
            along = job_for(plan.job(), config, model, plan.cuts)
            one = predicted(schedule, along, costs.layers, costs.edge)
            if cap == named.max_held or one.held_mib <= most_mib:
                yield one, plan


def _parameters_of_fullest(job: Job, layers: Sequence[LayerCosts]) -> int:
    """Parameters of the rank that has most."""
    of_stages = [
        sum(layer.parameters for layer in layers[first:end]) for first, end in pairwise(job.cuts)
    ]
    return max(sum(of_stages[stage] for stage in held) for held in job.placement.held)
