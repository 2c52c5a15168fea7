"""Steps, and the sums before them where a bucket has several copies (data parallelism).

    head          needs                                   then
    ------------  --------------------------------------  -------------------------------------
    reduce s.t/b  a part from each copy; only of        a sum to each copy
                  buckets that are shared, and not
                  added up by a library
    step s.t/b    bucket b is whole; the losses of all    the weights of step t+1, once all
                  pipes; the vote where there is one;     buckets of the stage have stepped
                  its state where that is offloaded

Parts are the first half of an all-reduce (reduce-scatter), sums the second (all-gather). A bucket
is *whole* when a sum has come from each copy; where it has one copy, when the last B or W of
the step has started. The losses give the divisor of the gradient, and say that all went well.
"""

from collections.abc import Callable, Iterator

from ..bucket import BucketCopy, Copies
from ..job import Seat
from ..lane import Gate
from ..message import Meaning, Message, numbered
from ..task import Kind, Task
from .collectives import by_library, ready
from .row import Need, Row, StageHere, nothing, urgent


def replicas(here: StageHere) -> Iterator[Row]:
    """The rows of each bucket of a stage."""
    for bucket, copies in enumerate(here.buckets):
        if len(copies) > 1 and not by_library(here.job, copies):
            parts_of_all = Need(Meaning.PART, seats_of(copies), bucket)
            then = nothing if here.job.shards else sums(here)
            yield Row(Kind.REDUCE, (parts_of_all,), urgent(0), then, bucket=bucket)
        # Buckets may leave and step before their stage's backward is done; the next step may not
        # begin before. One of them waits for it.
        backward = (Need(here.completes),) if bucket == 0 else ()
        tried = here.job.speculates  # then a commit waits for the vote, and opens the weights
        vote = () if tried else voted(here)
        needs = (whole(here, bucket), *backward, losses_of_all(here), *vote)
        all_needs = tuple(dict.fromkeys((*needs, *fetched(here, bucket))))
        yield Row(
            Kind.STEP,
            all_needs,
            urgent(3),
            new_weights(here, tried),
            bucket=bucket,
            opens=opened(here, tried),
        )


def opened(here: StageHere, tried: bool = False) -> Gate | None:
    """The gate that the end of a step opens.

    Args:
        here: the stage.
        tried: True if the step may be taken back, so that it opens none.
    """
    return None if tried or here.job.shards else Gate.WEIGHTS


def new_weights(here: StageHere, tried: bool = False) -> Callable[[Task], list[Message]]:
    """After a step, a message to each copy that its new weights are there, where there are shards;
    see `opened`."""
    if tried or not here.job.shards:
        return lambda task: []
    return lambda task: to_copies(Meaning.WEIGHTS, here, task.part, task.microbatch)


def seats_of(copies: Copies) -> tuple[Seat, ...]:
    """The pipe and stage of each copy, in the order of the copies."""
    return tuple(Seat(copy.pipe, copy.stage) for copy in copies)


def whole(here: StageHere, bucket: int) -> Need:
    """The bucket has the gradient of all microbatches of all its copies; of its shard alone where
    there are shards."""
    copies = here.buckets[bucket]
    if len(copies) == 1:
        return Need(here.completes)
    if by_library(here.job, copies):
        return Need(Meaning.SUM, (here.seat,), bucket)
    if here.job.shards:
        return Need(Kind.REDUCE, bucket=bucket)
    return Need(Meaning.SUM, seats_of(copies), bucket)


def losses_of_all(here: StageHere) -> Need:
    """Every pipe's losses of the step are here."""
    last = here.job.last_stage
    return Need(Meaning.LOSS, tuple(Seat(pipe, last) for pipe in range(here.job.pipes)))


def voted(here: StageHere) -> tuple[Need, ...]:
    """The norm of all gradients is known; needed only where steps wait for it."""
    return (Need(Meaning.VOTE, (Seat(0, 0),)),) if here.job.votes else ()


def fetched(here: StageHere, bucket: int) -> tuple[Need, ...]:
    """The state of the bucket is on the device; needed only where it is offloaded."""
    return (Need(Kind.FETCH, bucket=bucket),) if here.job.slots else ()


def parts(here: StageHere, task: Task, bucket: int) -> list[Message]:
    """With a step's last microbatch, a message to each copy of a shared bucket: a part of its
    gradient is there. Where the library adds up, one that this copy is ready."""
    if not here.job.ends_a_step(task.microbatch) or len(here.buckets[bucket]) == 1:
        return []
    step, _ = here.job.step_of(task.microbatch)
    if by_library(here.job, here.buckets[bucket]):
        return ready(here, bucket, step)
    return to_copies(Meaning.PART, here, bucket, step)


def sums(here: StageHere) -> Callable[[Task], list[Message]]:
    """After a reduce, a message to each copy of the bucket: a shard has been added up."""
    return lambda task: to_copies(Meaning.SUM, here, task.part, task.microbatch)


def to_copies(meaning: Meaning, here: StageHere, bucket: int, step: int) -> list[Message]:
    """One message for each copy of a bucket, this one included; each copy owns a shard of its
    own."""
    copies = here.buckets[bucket]
    number = numbered(step, copies, BucketCopy(*here.seat, bucket))
    return [Message(meaning, to.stage, number, to.pipe, to.bucket) for to in copies]
