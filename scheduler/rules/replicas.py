"""Steps, and the sums before them where a bucket has several copies (data parallelism)."""

#   head          needs                                   then
#   ------------  --------------------------------------  -------------------------------------
#   reduce s.t/b  a part from each copy; only of          a sum to each copy; see `sharding.py`
#                 buckets that are shared, and not        for shards, and `groups.py` for sums
#                 added up by a library                   in two levels
#   step s.t/b    bucket b is whole; the losses of all    the weights of step t+1, once all
#                 pipes; the vote where there is one;     buckets of the stage have stepped; see
#                 its state where that is offloaded;      `sharding.py`, `residencies.py` for
#                 the release of whole weights; none      shards
#                 where steps are on the host; for what
#                 it needs of refreshes `refreshes.py`
#
# Parts are the first half of an all-reduce (reduce-scatter), sums the second (all-gather). A bucket
# is *whole* when a sum has come from each copy; where it has one copy, when the last B or W of the
# step has started. The losses give the divisor of the gradient, and say that all went well.
#
# Where a step has several reductions, backwards of a run wait for the reduction of the run before
# last. That needs parts of all copies of the stage, whose runs before last have begun. So nobody
# waits in a circle: of all runs that wait, take one of the least number. Copies of a tied bucket
# are on several stages, and the run of another stage may wait for the place that this one has for
# whole weights. Where that may be, tied buckets keep no run back.

from collections.abc import Callable, Iterator

from ..bucket import BucketCopy, Copies, across, alike, of_group
from ..counters import Gate
from ..job import StageCopy
from ..message import Meaning, Message, numbered
from ..task import Counts, Kind, Task
from .collectives import by_library, ready
from .refreshes import refreshed
from .row import Need, Opening, Row, StageHere, at_once, for_steps, nothing, urgent


def replicas(here: StageHere) -> Iterator[Row]:
    """The rows of each bucket of a stage."""
    for bucket, copies in enumerate(here.buckets):
        if len(copies) > 1 and not by_library(here.job, copies):
            parts_of_all = Need(Meaning.PART, stage_copies_of(near(here, bucket)), bucket)
            then = nothing if here.job.shards else sums(here)
            then = subtotals(here) if here.job.is_grouped else then
            opens = (run_after_next(here),) if holds_back(here, copies) else ()
            yield Row(Kind.REDUCE, (parts_of_all,), at_once, then, bucket=bucket, opens=opens)
        if here.job.steps_on_host:
            continue
        done = stage_is_done(here, bucket)
        needs = (whole(here, bucket), *done, losses_of_all(here), *voted(here), *let_go(here))
        all_needs = tuple(dict.fromkeys((*needs, *fetched(here, bucket), *refreshed(here))))
        yield Row(
            Kind.STEP,
            all_needs,
            urgent(3),
            new_weights(here),
            bucket=bucket,
            opens=() if here.job.offloads_weights else opened(here),
        )


def opened(here: StageHere) -> tuple[Opening, ...]:
    """The gates that the end of a step opens; where weights are in scratch, it has ended when they
    are there."""
    job, stage = here.job, here.stage_copy.stage
    if job.shards and not job.residencies:
        return ()
    of_step = for_steps(job, Gate.WEIGHTS)
    if not job.residencies:
        return of_step
    a_step = job.a_step(Counts.RESIDENCIES, stage)
    return (*of_step, Opening(Gate.STEPPED, lambda steps: (steps + 1) * a_step))


def run_after_next(here: StageHere) -> Opening:
    """A reduction opens the run after the next one to backwards.

    Otherwise a rank whose replica is faster would have all gradients of its runs on their way.
    """
    return Opening(Gate.REDUCED, lambda runs: here.job.first_of_run(runs + 2))


# Tied buckets keep no run back where a rank has fewer places than stages, and three reductions. A
# third run would wait for the sums of the first, and so for the backward of every tied layer, whose
# residency may wait for the place of this one: hypothesis found it. Refusing these settings was
# tried first. To wait nowhere would leave more gradients of tied weights on their way.
def holds_back(here: StageHere, copies: Copies) -> bool:
    """Backwards of a run wait for the reduction of the run before last of a bucket."""
    is_tied = any(copy.stage != here.stage_copy.stage for copy in copies)
    return here.job.reductions > 1 and not (is_tied and here.job.ties_may_wait_in_a_circle)


def reduced(here: StageHere) -> tuple[Need, ...]:
    """Of the stage's gradients no more than that of the run before is on its way; needed only
    where they are let go within a step."""
    holds = any(holds_back(here, copies) for copies in here.buckets)
    return (Need(Gate.REDUCED),) if holds else ()


def new_weights(here: StageHere) -> Callable[[Task], list[Message]]:
    """After a step, a message to each copy that its new weights are there, where there are shards
    and weights are always whole; see `opened`."""
    if not here.job.shards or here.job.residencies:
        return lambda task: []
    return lambda task: weights(here, task.part, task.microbatch)


def near(here: StageHere, bucket: int) -> Copies:
    """The copies of a bucket that add up with this one: those of its group."""
    me = BucketCopy(*here.stage_copy, bucket)
    return of_group(here.buckets[bucket], me, here.job.pipes_a_group)


def column(here: StageHere, bucket: int) -> Copies:
    """The copies of a bucket, one of each group, that own the same shard as this one."""
    return across(
        here.buckets[bucket], BucketCopy(*here.stage_copy, bucket), here.job.pipes_a_group
    )


def stage_copies_of(copies: Copies) -> tuple[StageCopy, ...]:
    """The pipe and stage of each copy, in the order of the copies."""
    return tuple(StageCopy(copy.pipe, copy.stage) for copy in copies)


def whole(here: StageHere, bucket: int) -> Need:
    """The bucket has the gradient of all microbatches of all its copies; of its shard alone where
    there are shards."""
    copies = here.buckets[bucket]
    if len(copies) == 1:
        return Need(here.completes)
    if by_library(here.job, copies):
        return Need(Meaning.SUM, (here.stage_copy,), bucket)
    if here.job.shards:
        if here.job.is_grouped:
            return Need(Meaning.TOTAL, stage_copies_of(column(here, bucket)), bucket)
        return Need(Kind.REDUCE, bucket=bucket)
    return Need(Meaning.SUM, stage_copies_of(near(here, bucket)), bucket)


def stage_is_done(here: StageHere, bucket: int) -> tuple[Need, ...]:
    """The stage's backward is done. Buckets may leave and step before it is; the next step may not
    begin before, so the first bucket waits for it."""
    return (Need(here.completes),) if bucket == 0 else ()


# A step hears all losses, since weighted losses need all weights; the vote is a task.
def losses_of_all(here: StageHere) -> Need:
    """Every pipe's losses of the step are here."""
    last = here.job.last_stage
    return Need(Meaning.LOSS, tuple(StageCopy(pipe, last) for pipe in range(here.job.pipes)))


def voted(here: StageHere) -> tuple[Need, ...]:
    """The norm of all gradients is known; needed only where steps wait for it."""
    return (Need(Meaning.VOTE, (StageCopy(0, 0),)),) if here.job.votes else ()


def fetched(here: StageHere, bucket: int) -> tuple[Need, ...]:
    """The state of the bucket is on the device; needed only where it is offloaded."""
    return (Need(Kind.FETCH, bucket=bucket),) if here.job.slots else ()


def let_go(here: StageHere) -> tuple[Need, ...]:
    """Whole weights of the step have been let go; needed only where they come for residencies, from
    shards that are stepped where they are."""
    return (Need(Kind.RELEASE),) if here.job.residencies and not here.job.offloads_weights else ()


def parts(here: StageHere, task: Task, bucket: int) -> list[Message]:
    """With the last microbatch of a step, or of each reduction, a message to each copy of a shared
    bucket: a part of its gradient is there. Where the library adds up, one that this copy is
    ready."""
    if not here.job.ends_a_run(task.microbatch) or len(here.buckets[bucket]) == 1:
        return []
    if by_library(here.job, here.buckets[bucket]):
        step, _ = here.job.step_of(task.microbatch)
        return ready(here, bucket, step)
    return to_copies(
        Meaning.PART, near(here, bucket), here, bucket, here.job.run_of(task.microbatch)
    )


def sums(here: StageHere) -> Callable[[Task], list[Message]]:
    """A message to each copy of the group: a shard has been added up."""
    return lambda task: to_copies(
        Meaning.SUM, near(here, task.part), here, task.part, task.microbatch
    )


def subtotals(here: StageHere) -> Callable[[Task], list[Message]]:
    """After the last reduce of a step, a message to the copy in each group that owns the same
    shard: its part of the shard has been added up over this group."""

    def follow(task: Task) -> list[Message]:
        step = here.job.step_completed_by(task.microbatch)
        if step is None:
            return []
        return to_copies(Meaning.SUBTOTAL, column(here, task.part), here, task.part, step)

    return follow


def weights(here: StageHere, bucket: int, number: int) -> list[Message]:
    """A message to each copy of a bucket of this layer, in the group: the weights of this copy's
    shard are there.

    Args:
        bucket: index of the bucket.
        number: number of the residency, or of the step where weights are always whole.
    """
    me = BucketCopy(*here.stage_copy, bucket)
    of_layer = alike(near(here, bucket), me)
    numbered_by_me = numbered(number, of_layer, me)
    return [Message(Meaning.WEIGHTS, to.stage, numbered_by_me, to.pipe, bucket) for to in of_layer]


def weights_of_all(here: StageHere, bucket: int) -> Need:
    """The weights of all shards of a bucket are here."""
    of_layer = alike(near(here, bucket), BucketCopy(*here.stage_copy, bucket))
    return Need(Meaning.WEIGHTS, stage_copies_of(of_layer), bucket)


def to_copies(
    meaning: Meaning, copies: Copies, here: StageHere, bucket: int, step: int
) -> list[Message]:
    """One message for each of some copies of a bucket, this one included.

    Args:
        copies: copies that hear it, of which each has such messages of all.
        bucket: index of the bucket.
    """
    number = numbered(step, copies, BucketCopy(*here.stage_copy, bucket))
    return [Message(meaning, to.stage, number, to.pipe, to.bucket) for to in copies]
