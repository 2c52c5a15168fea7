"""The schedule of a run that names no policy.

Without costs it is the first of a short list that the model can be cut for. With a sample the
layers are measured, and the run follows a plan (`plan_from_costs`) on the same placement with the
same cuts, so that no measurement decides which weights a rank holds. The cap grows where that is
worth it: half as many activations again, or twice as many, if the steps become faster and the
memory is there.
"""

import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from axrt.config import AUTO, DEFAULTS, Config, Schedule
from axrt.device import CPU, free_memory
from axrt.errors import ConfigError
from axrt.known_costs import KnownCosts
from axrt.mesh import Mesh
from axrt.model.layers import num_multiplied
from axrt.model.module import PipelineModule
from axrt.model.partition import OPERATIONS, busiest
from axrt.model_job import Found, job_for, job_with, with_replicas
from axrt.plan_from_costs import SentPlan, possible_plan
from axrt.rank import Rank
from axrt.scheduler.job import Job
from axrt.scheduler.policies import CAPPED, FIXED, policy_by_name
from axrt.step_prediction import AS_FAST, Candidate, predicted

_AS_MUCH = 1.1  # work of the busiest rank, in that with one stage a rank
_TASKS = 256  # ranks times microbatches: a plan of more takes too long for a start nobody asked for
_MORE = (3, 4)  # caps in halves of what the policy holds by itself
_OF_FREE = 0.1  # share of the memory left that more activations may take
_STATE_BYTES = 18  # of a parameter with Adam: narrow weights and gradients, masters and moments
_MIB = 2**20


def plans_by_default(config: Config, mesh: Mesh) -> bool:
    """A run of these settings follows a plan if it is given a sample."""
    asked = config.schedule
    return (
        not (asked.policy or asked.costs or asked.chunks)
        and 1 < mesh.pipe <= _TASKS // asked.microbatches
        and config.memory.recompute != AUTO
    )


def free_bytes(rank: Rank) -> float:
    """Bytes that are free for the rank with the fewest, on the main rank; 0 on others. Every rank
    calls it."""
    found = rank.exchange.gathered((socket.gethostname(), free_memory(rank.device)))
    if not found:
        return 0.0
    hosts = Counter(host for host, _ in found)
    shared = hosts if rank.device == CPU else Counter[str]()
    return min(float(free) / max(1, shared[host]) for host, free in found)


def with_a_plan(
    config: Config, model: PipelineModule, mesh: Mesh, costs: KnownCosts, free: float
) -> tuple[str, int, SentPlan | None, list[str]]:
    """The schedule for measured costs.

    Args:
        config: settings of the run, which name no policy.
        model: layers that the schedule cuts into stages.
        mesh: numbers of pipelines and replicas.
        costs: what was measured.
        free: bytes that are free for each rank, before it has weights.
    Returns:
        Policy, cap, the plan that it follows if it does, and what was simulated, one text each, the
        chosen one first. Of what is within 1 % of the fastest, the one that holds least is chosen.
    """
    schedule, job = settled(config, model, mesh)
    by_itself = predicted(schedule, job, costs.layers, costs.edge)
    found = [(by_itself, None), *_planned(config, model, mesh, costs, job)]
    least = min(one.held_mib for one, _ in found)
    state = _STATE_BYTES * sum(layer.parameters for layer in costs.layers) / mesh.pipe
    most = least + _OF_FREE * max(0.0, (free - state) / _MIB - least)
    fitting = [of for of in found if of[0].held_mib <= most]
    fastest = min(one.step_s for one, _ in fitting)
    best = min(
        (of for of in fitting if of[0].step_s <= AS_FAST * fastest), key=lambda of: of[0].held_mib
    )
    texts = [f"{one}{' along a plan' if plan else ''}" for one, plan in (best, *found)]
    return best[0].schedule.policy, best[0].schedule.max_held, best[1], list(dict.fromkeys(texts))


def _planned(
    config: Config, model: PipelineModule, mesh: Mesh, costs: KnownCosts, job: Job
) -> list[tuple[Candidate, SentPlan | None]]:
    """Plans of `adaptive` where a job has its stages, with the cap that is asked for or several."""
    parallel = replace(config.parallel, partition=job.cuts)
    asked = replace(config.schedule, placement=job.placement.name)
    is_given = asked.max_held or config.memory.activations_mb or config.memory.device_gb
    found: list[tuple[Candidate, SentPlan | None]] = []
    for halves in (2,) if is_given else (2, *_MORE):
        cap = asked.max_held if halves == 2 else halves * mesh.pipe
        of = replace(asked, max_held=cap)
        plan = possible_plan(replace(config, schedule=of, parallel=parallel), model, mesh, costs)
        if plan is not None:
            along = job_for(plan.job(), config, model, plan.cuts)
            named = replace(config.schedule, policy="adaptive", max_held=cap)
            found.append((predicted(named, along, costs.layers, costs.edge), plan))
    return found


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
        else job_with(config.schedule, config, model, mesh.pipe)
    )
    return schedule, with_replicas(job, mesh, config)


def _by_default(config: Config, model: PipelineModule, ranks: int) -> Found:
    """The first of `DEFAULTS` that the model can be cut for, on the placement that is asked for if
    one is; one with a stage a rank where that leaves the busiest rank with less work."""
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
