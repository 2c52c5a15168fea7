"""From the settings of `[schedule]` to a job: a policy on a placement with a number of
microbatches."""

import hashlib
from pathlib import Path
from typing import Any

from axrt.config import Memory, Schedule
from axrt.errors import ConfigError
from axrt.scheduler.job import Job
from axrt.scheduler.plural import plural
from axrt.scheduler.policies import FIXED, AlongPlan
from axrt.scheduler.regular_file import read_bytes
from axrt.scheduler.simulation.schedules import LOOSELY, STRICTLY, build_schedule


def job_of(settings: Schedule, ranks: int) -> Job:
    """The job of a configuration's schedule.

    Raises:
        ConfigError: keys of the section do not go together.
    """
    try:
        return build_schedule(
            settings.policy,
            ranks,
            settings.microbatches,
            placement=settings.placement,
            chunks=settings.chunks,
            max_held=settings.max_held,
            order=settings.order,
        )
    except ValueError as error:
        raise ConfigError(f"[schedule] {error}") from None


def few_microbatches(ranks: int, microbatches: int) -> str:
    """A line about a pipeline that waits by its numbers alone; "" where it need not.

    Source: with one stage a rank the first and the last microbatch leave ranks idle for
        (p - 1) / (m + p - 1) of a step; Huang et al. 2019 (GPipe) find that negligible from
        m = 4 p on.
    """
    if microbatches >= ranks:
        return ""
    idle = (ranks - 1) / (microbatches + ranks - 1)
    return (
        f"schedule.microbatches = {microbatches} on {plural(ranks, 'rank')} of a pipeline leaves "
        f"each of them idle for about {idle:.0%} of a step; expected {4 * ranks} or more"
    )


def digest_of_order(settings: Schedule) -> str:
    """A digest of the file with the order, which every rank reads by itself and all must have
    alike.

    It is "" where `schedule.order` is no file.
    """
    file = Path(settings.order)
    return hashlib.sha256(read_bytes(file)).hexdigest()[:12] if file.is_file() else ""


def described(settings: Schedule, job: Job, memory: Memory) -> dict[str, Any]:
    """What a timeline says of the schedule that it was measured under, by the keys of a world of
    `axrt simulate`."""
    along = job.policy if isinstance(job.policy, AlongPlan) else None
    return {
        "name": FIXED if along else settings.policy,
        "ranks": job.ranks,
        "microbatches": job.drawn_a_step,
        **({"share": True} if job.drawn else {}),
        "placement": job.placement.name,
        "chunks": settings.chunks,
        "cuts": list(job.cuts),
        "microbatch_size": settings.microbatch_size,
        "max_held": along.cap if along else settings.max_held,
        "order": str(along.order) if along else settings.order,
        **({"along": STRICTLY if along.strict else LOOSELY} if along else {}),
        "replicas": job.replicas,
        "clips": job.votes,
        "recompute": memory.recompute,
        "slots": job.slots,
        "held_on_device": job.held_on_device,
        "host_slots": job.host_slots,
        "zero": memory.zero * job.shards,
        "reductions": job.reductions,
        "gathered": memory.gathered,
        "offloads_weights": job.offloads_weights,
        "group": job.group // (job.placement.pipes * job.team),
    }
