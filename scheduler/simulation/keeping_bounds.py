"""Whether a run of a schedule held no more than its policy's bounds say."""

from ..job import Job
from ..plural import plural
from ..task import Kind
from .timeline import Timeline


def broken_bound(line: Timeline, job: Job) -> str:
    """Which rank held more chunks than its bounds say; "": none did."""
    for rank, held in enumerate(_most_held(line, job)):
        bound = job.policy.bounds(job.placement, rank, job.microbatches).held
        if held > bound:
            return (
                f"rank {rank} held {plural(held, 'chunk')}, and bounds(...).held says {bound}; "
                "expected bounds that are never exceeded: memory and mailboxes are made for them"
            )
    return ""


def _most_held(line: Timeline, job: Job) -> list[int]:
    """The most chunks that each rank has begun and not ended, by the starts of its tasks."""
    last = Kind.WEIGHT if job.splits else Kind.BACKWARD
    most = [0] * job.ranks
    held = [0] * job.ranks
    for span in sorted(line.computing(), key=lambda span: span.start):
        if span.task.kind is Kind.FORWARD:
            held[span.rank] += 1
        elif span.task.kind is last and span.task.part == 0:
            held[span.rank] -= 1
        most[span.rank] = max(most[span.rank], held[span.rank])
    return most
