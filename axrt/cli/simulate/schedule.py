"""One schedule as the options of `axrt simulate` describe it: its job, costs, timeline and
figures."""

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any

from axrt.planning.few_joints import exchanges_of
from axrt.scheduler.job import Job
from axrt.scheduler.lacks import CAUSES
from axrt.scheduler.numbering import StageJoints
from axrt.scheduler.planning.recompute import most_recomputed, recomputed_shares
from axrt.scheduler.planning.shards import with_shards
from axrt.scheduler.plural import plural
from axrt.scheduler.sharing import with_sharing
from axrt.scheduler.simulation.cost_table import CostTable
from axrt.scheduler.simulation.costs import Costs, Edge, Work
from axrt.scheduler.simulation.schedules import build_schedule
from axrt.scheduler.simulation.simulator import simulate
from axrt.scheduler.simulation.timeline import Timeline
from axrt.scheduler.task import Kind

from .measured_costs import in_layers, known_costs, world_on
from .world import is_key


def simulated(name: str, options: dict[str, Any]) -> tuple[Job, Timeline]:
    """The job of a policy, and its simulated timeline; raises `ValueError` where the options do not
    go together."""
    job = build_schedule(
        name,
        options["ranks"],
        options["microbatches"],
        placement=options["placement"],
        chunks=options["chunks"],
        max_held=options["max_held"],
        order=options["order"],
    )
    return job, line_of(job, costs_of(job, options), options)


def costs_of(job: Job, options: dict[str, Any]) -> Costs:
    """The costs of a schedule: those of the options, or of a table for the model."""
    if isinstance(options["costs"], CostTable):
        table = options["costs"]
        of, known = world_on(job.placement, table, options).costs, known_costs(table, options)
        costs = _of_options(job, {**options, "costs": (1.0, 1.0, 1.0)}, of.edge)
        costs = replace(costs, jitter=of.jitter, lengths=of.lengths, pieces=of.pieces)
        exchanges = exchanges_of(in_layers(job, known), known) if known.team > 1 else ()
        costs = replace(costs, work=of.work, edges=of.edges, task=of.task, exchange_of=exchanges)
    else:
        costs = _of_options(job, options, Edge(options["latency"], 1.0))
    return costs.on(options["cluster"]) if options["cluster"] else costs


def _of_options(job: Job, options: dict[str, Any], edge: Edge) -> Costs:
    fetch, store = options["copy_costs"]
    ranks, factor = options["node"] or (0, 1.0)
    # sizes are bytes on a cluster, and elsewhere what they take on an edge
    size = 1.0 if options["cluster"] else edge.bandwidth
    bring, take = options["stash_costs"]
    return Costs(
        _work(job, options),
        reduce=options["reduce_cost"],
        bucket=options["reduce_transfer"] * size if options["reduce_transfer"] else 0.0,
        step=options["step_cost"],
        state=1.0,
        others={
            Kind.UNLOAD: store,
            Kind.HOST_STEP: options["step_cost"],
            Kind.LOAD: fetch,
            Kind.BRING: options["bring_cost"],
        },
        copies_in=1 / fetch if fetch else inf,
        copies_out=1 / store if store else inf,
        offload=take,
        reload=bring,
        task=options["task_cost"],
        edge=edge,
        message=options["message_cost"],
        node=int(ranks),
        between_nodes=edge._replace(bandwidth=edge.bandwidth / factor),
        jitter=options["jitter"] or 0.0,
        lengths=options["lengths"] or 0.0,
        hiccups=options["hiccups"],
        stragglers=dict(enumerate(options["stragglers"])),
        recomputed=_recomputed(job, options),
        pieces=options["pieces"] or Costs().pieces,
        linger=options["linger"],
        exchange=options["exchange"],
        seed=options["seed"],
    )


def _work(job: Job, options: dict[str, Any]) -> Work | tuple[Work, ...]:
    """The cost of a rank, or of each stage; raises `ValueError` where there are others."""
    sent = options["transfer"]
    if not options["stage_costs"]:
        forward, back, weight = options["costs"]
        return Work(forward, back, weight, sent)
    if len(options["stage_costs"]) != job.stages:
        raise ValueError(
            f"--stage-costs are of {plural(len(options['stage_costs']), 'stage')}, and there are "
            f"{job.stages}; expected costs of each stage"
        )
    return tuple(
        [Work(forward, back, weight, sent) for forward, back, weight in options["stage_costs"]]
    )


def line_of(job: Job, costs: Costs, options: dict[str, Any]) -> Timeline:
    """The timeline of a schedule with the replicas, shards and scratch of the options; raises
    `ValueError` where they do not go together."""
    try:
        job = replace(
            job,
            replicas=options["replicas"],
            recomputed=dict.fromkeys(costs.recomputed, 1),
            votes=options["clip"],
            slots=options["slots"],
            host_slots=options["host_slots"],
            held_on_device=options["offload_activations"],
            team=options["tensor"],
            joints=_joints(job, options),
            fills=options["fill"] != "never",
        )
        if options["share"]:
            job = with_sharing(job)
        gathered, group = options["gathered"] or 2, options["group"]
        brings = options["bring_cost"] > 0
        job = with_shards(job, options["zero"], options["reductions"], gathered, group, brings)
    except ValueError as error:
        name = str(error).partition(" ")[0]
        raise ValueError(f"{'world.' if is_key(name) else '--'}{error}") from None
    ways = (True, False) if job.joints and options["fill"] == "auto" else (job.fills,)
    lines = [
        simulate(
            replace(job, fills=fills),
            costs,
            steps=options["steps"],
            barrier=options["barrier"],
            buckets=options["buckets"],
        )
        for fills in ways
    ]
    return min(lines, key=lambda line: line.makespan)


def _joints(job: Job, options: dict[str, Any]) -> Mapping[int, StageJoints]:
    if isinstance(options["costs"], CostTable):
        return in_layers(job, known_costs(options["costs"], options)).joints
    joints = StageJoints(options["joints"], options["joints"])
    return dict.fromkeys(range(job.stages), joints) if options["joints"] else {}


def figures_of(job: Job, line: Timeline, options: dict[str, Any]) -> dict[str, Any]:
    """What is printed of a simulated schedule."""
    return {
        "policy": job.policy.name,
        "placement": job.placement.name,
        "ranks": job.ranks,
        "microbatches": job.microbatches,
        "chunks": job.placement.chunks,
        "makespan": line.makespan,
        "span": line.span,
        "in_flight": line.in_flight,
        "held": line.held,
        "held_on_device": line.held_on_device,
        "held_mib": _stash(job, line, options, options["held_mib"]),
        "idle": line.idle(),
        "idle_by_cause": {cause: line.idle(cause) for cause in CAUSES},
        "utilisation": line.utilisation,
        "tasks": line.tasks,
        **_cut(job, options),
    }


def _cut(job: Job, options: dict[str, Any]) -> dict[str, Any]:
    table = options["costs"]
    if not isinstance(table, CostTable):
        return {}
    return {"cuts": list(in_layers(job, known_costs(table, options)).cuts)}


def _stash(job: Job, line: Timeline, options: dict[str, Any], held_mib: float) -> list[float]:
    """The most activations that each rank holds, in MiB.

    Recomputed activations count from their recomputation on, and inputs of stages are not counted.
    """
    again = _recomputed(job, options)
    whole = [held_mib * job.placement.share] * job.stages
    if isinstance(options["costs"], CostTable):
        kept = world_on(job.placement, options["costs"], options).kept
        whole = [sum(of) / 2**20 for of in kept or ()]
    return line.stash(
        lambda stage: whole[stage] * (1 - again.get(stage, 0.0)),
        lambda stage: whole[stage] * again.get(stage, 0.0),
    )


def _recomputed(job: Job, options: dict[str, Any]) -> dict[int, float]:
    return recomputed_shares(
        job.policy, job.placement, job.microbatches, most_recomputed(options["recompute"])
    )
