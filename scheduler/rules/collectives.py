"""Gradients added up by a library's collectives (NCCL, gloo), in the order of tickets."""

#   head            needs                             then
#   --------------  --------------------------------  ------------------------------------------
#   announce s.t/b  that every copy is ready; only    a ticket to each copy
#                   on the lowest rank of the group
#   collect s.t/b   its ticket, and that it is the    a sum to itself; with shards that of its
#                   next one of the group             own, after a reduce-scatter
#
# A copy is *ready* when its own gradient of the step is complete; it says so to the lowest rank of
# those that hold the bucket. Nobody issues before all are ready, so none occupies a device while it
# waits for others. See `tickets.py` for the order.
#
# Each copy must have a rank of its own. Buckets of which one rank holds several copies, tied
# weights, are added up by messages (`replicas.py`).

from collections.abc import Callable, Iterator, Mapping, Sequence

from ..bucket import BucketCopy, Copies
from ..job import Job, StageCopy
from ..message import Meaning, Message, numbered
from ..task import Kind, Task
from .row import Need, OnDevice, Row, StageHere, at_once, urgent


def collectives(here: StageHere) -> Iterator[Row]:
    """The rows of each bucket of a stage that a library adds up."""
    for bucket, copies in enumerate(here.buckets):
        if not by_library(here.job, copies):
            continue
        me, first = BucketCopy(*here.stage_copy, bucket), leader(here.job, copies)
        if me == first:
            everyone = tuple(StageCopy(copy.pipe, copy.stage) for copy in copies)
            yield Row(
                Kind.ANNOUNCE,
                (Need(Meaning.READY, everyone, bucket),),
                at_once,
                tickets(copies),
                bucket=bucket,
                queue=OnDevice.TICKETS,
                gives_tickets=True,
            )
        yield Row(
            Kind.COLLECT,
            (Need(Meaning.TICKET, (StageCopy(first.pipe, first.stage),), bucket),),
            urgent(1),
            sum_here(me),
            bucket=bucket,
            queue=OnDevice.COLLECTIVES,
            by_ticket=True,
        )


def by_library(job: Job, copies: Copies) -> bool:
    """A bucket with these copies is added up by the library."""
    return job.by_library and len(set(places(job, copies))) == len(copies) > 1


def places(job: Job, copies: Copies) -> Sequence[tuple[int, int]]:
    """The replica and rank that hold each copy."""
    return [job.place_of(copy.pipe, copy.stage) for copy in copies]


def by_rank(job: Job, copies: Copies) -> Copies:
    """The copies of a bucket in the order of the ranks that hold them."""
    return tuple(sorted(copies, key=lambda copy: job.place_of(copy.pipe, copy.stage)))


def groups_of(
    job: Job, buckets: Mapping[int, Sequence[Copies]]
) -> dict[tuple[int, int], tuple[tuple[int, int], ...]]:
    """The group of ranks of each bucket that the library adds up: replica and rank of each.

    Args:
        buckets: copies of each bucket of a stage, by stage.
    """
    return {
        (stage, bucket): tuple(sorted(places(job, copies)))
        for stage, of_stage in buckets.items()
        for bucket, copies in enumerate(of_stage)
        if by_library(job, copies)
    }


def leader(job: Job, copies: Copies) -> BucketCopy:
    """The copy on the lowest rank of those that hold the bucket."""
    return by_rank(job, copies)[0]


def ready(here: StageHere, bucket: int, step: int) -> list[Message]:
    """The message to the lowest rank: this copy's gradient of the step is complete."""
    copies = here.buckets[bucket]
    to = leader(here.job, copies)
    number = numbered(step, copies, BucketCopy(*here.stage_copy, bucket))
    return [Message(Meaning.READY, to.stage, number, to.pipe, to.bucket)]


def tickets(copies: Copies) -> Callable[[Task], list[Message]]:
    """A message to each copy, whose number will be that of the ticket."""
    return lambda task: [
        Message(Meaning.TICKET, to.stage, task.microbatch, to.pipe, to.bucket) for to in copies
    ]


def sum_here(me: BucketCopy) -> Callable[[Task], list[Message]]:
    """The message to this copy: the gradient is that of all copies."""
    return lambda task: [Message(Meaning.SUM, me.stage, task.microbatch, me.pipe, me.bucket)]
