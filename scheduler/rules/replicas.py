"""Steps, and the sums before them where a bucket has several holders (data parallelism).

    head          needs                                   then
    ------------  --------------------------------------  -------------------------------------
    reduce s.t/b  a part from each holder; only of        a sum to each holder
                  buckets that are shared
    step s.t/b    bucket b is whole; the losses of all    the weights of step t+1, once all
                  pipes; the vote where there is one      buckets of the stage have stepped

Parts are the first half of an all-reduce (reduce-scatter), sums the second (all-gather). A bucket
is *whole* when a sum has come from each holder; where it has one holder, when the last B or W of
the step has started. The losses say by what the gradient is to be divided, and that all went well.
"""

from collections.abc import Callable, Iterator

from ..bucket import Holder, Holders
from ..job import Seat
from ..lane import Gate
from ..message import Meaning, Message
from ..task import Kind, Task
from .row import Need, Row, StageHere, numbered, urgent


def replicas(here: StageHere) -> Iterator[Row]:
    """The rows of each bucket of a stage; every holder keeps all of the optimizer's state."""
    for bucket, holders in enumerate(here.buckets):
        if len(holders) > 1:
            parts_of_all = Need(Meaning.PART, seats_of(holders), bucket)
            yield Row(Kind.REDUCE, (parts_of_all,), urgent(0), sums(here), bucket=bucket)
        needs = (whole(here, bucket), losses_of_all(here), *voted(here))
        yield Row(Kind.STEP, needs, urgent(3), bucket=bucket, opens=Gate.WEIGHTS)


def seats_of(holders: Holders) -> tuple[Seat, ...]:
    return tuple(Seat(holder.pipe, holder.stage) for holder in holders)


def whole(here: StageHere, bucket: int) -> Need:
    """The bucket has the gradient of all microbatches of all its holders."""
    holders = here.buckets[bucket]
    if len(holders) == 1:
        return Need(here.completes)
    return Need(Meaning.SUM, seats_of(holders), bucket)


def losses_of_all(here: StageHere) -> Need:
    """Every pipe's losses of the step."""
    last = here.job.last_stage
    return Need(Meaning.LOSS, tuple(Seat(pipe, last) for pipe in range(here.job.pipes)))


def voted(here: StageHere) -> tuple[Need, ...]:
    """The norm of all gradients, where steps wait for it."""
    return (Need(Meaning.VOTE, (Seat(0, 0),)),) if here.job.votes else ()


def parts(here: StageHere, task: Task, bucket: int) -> list[Message]:
    """With a step's last microbatch, to the holders of a shared bucket: a part of its gradient is
    there."""
    if not here.job.ends_a_step(task.microbatch) or len(here.buckets[bucket]) == 1:
        return []
    step, _ = here.job.step_of(task.microbatch)
    return to_holders(Meaning.PART, here, bucket, step)


def sums(here: StageHere) -> Callable[[Task], list[Message]]:
    """After a reduce, to the holders of its bucket: a shard has been added up."""
    return lambda task: to_holders(Meaning.SUM, here, task.part, task.microbatch)


def to_holders(meaning: Meaning, here: StageHere, bucket: int, step: int) -> list[Message]:
    """The same news of a bucket for each holder, this one included; each has its own shard of
    it."""
    holders = here.buckets[bucket]
    number = numbered(step, holders, Holder(*here.seat, bucket))
    return [Message(meaning, to.stage, number, to.pipe, to.bucket) for to in holders]
