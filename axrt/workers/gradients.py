"""Follows the gradients of buckets through a step, and adds them up over copies: an all-reduce by
messages."""

# Parts are the reduce-scatter: each copy sends every other copy the shard that it owns. Sums are
# the all-gather: the owner of a shard sends its sum back. A bucket's parts leave when its own
# gradient is complete, which may be before its stage's is. Where there are groups of copies,
# subtotals and totals do the same with a shard, between the parts and the sums.
#
# Landing. `GradientWorker` tells the transport which memory waits for which sum. A large tensor
# lands there if device, type and layout fit; `take_sums` copies any other. A GPU has no landing.

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from axrt.device.device import is_on_host
from axrt.scheduler.bucket import BucketCopy, Copies
from axrt.scheduler.message import Meaning, Message, numbers_of, sender_of
from axrt.scheduler.task import Kind, Task
from axrt.store.bucket import Bucket
from axrt.store.gradient import Shards
from axrt.store.sum_across import SumAcross

from .worker import Land, Made, Mail, Worker, nothing

StillReads = Callable[[Tensor, float], bool]
# Bytes that a core copies in a second, about: waiting for the network may take as long as a copy.
_COPY_BYTES_PER_S = 4e9


class GradientWorker(Worker):
    """Sums shards, and takes their sums into buckets.

    Args:
        buckets: buckets of this rank, by stage.
        land: function that says into which memory the tensors of a message from another rank go,
            see `Transport.expect`.
        still_reads: function that says whether memory is still being sent, see
            `Transport.still_reads`.
        expect_weights: function that is called with a bucket whose shards are to be stepped, and
            the step, when its own gradient is complete.
        by_library: stage and index of each bucket that a library adds up.
        step_completed_by: function that gives the step whose gradient a reduction completes; None
            where others follow in its step.
    Attributes:
        leaving_in_parts: stages with a bucket that may leave before others are complete.
    """

    kinds = (Kind.REDUCE, Kind.ACROSS, Kind.JOIN)

    def __init__(
        self,
        buckets: Mapping[int, Sequence[Bucket]],
        mail: Mail,
        land: Land,
        still_reads: StillReads,
        expect_weights: Callable[[Bucket, int], None],
        by_library: Collection[tuple[int, int]] = (),
        step_completed_by: Callable[[int], int | None] = lambda reduction: reduction,
    ) -> None:
        self.leaving_in_parts = {
            stage
            for stage, of in buckets.items()
            if len(of) > 1
            and any(bucket.shared for bucket in of)
            and not any(bucket.virtual is not None for bucket in of)
        }
        self._buckets, self._mail, self._land = buckets, mail, land
        self._still_reads, self._by_library = still_reads, by_library
        self._expect_weights = expect_weights
        self._step_completed_by = step_completed_by
        # By the copy that a part is for, and the number of the copy that sends it: tied weights
        # may be held twice here.
        self._senders: dict[tuple[BucketCopy, int], Bucket] = {
            (to, bucket.within.copies.index(bucket.me)): bucket
            for of in buckets.values()
            for bucket in of
            for to in bucket.within.copies
        }
        self._copies: dict[BucketCopy, int] = {
            to: len(bucket.within.copies) for (to, _), bucket in self._senders.items()
        }
        self._here = {bucket.me for of in buckets.values() for bucket in of}
        self._closed: dict[int, set[int]] = {stage: set() for stage in buckets}
        # The tasks that have started and whose sums have not left.
        self._reducing: set[Task] = set()
        self._run: dict[object, Callable[[Task], Made]] = {
            Kind.REDUCE: self._reduce,
            Kind.ACROSS: self._sum_across,
            Kind.JOIN: self._join,
        }

    def complete_without(self, stage: int, waiting: Collection[Tensor]) -> tuple[int, ...]:
        """The buckets of a stage, by index, that have none of these parameters and were not
        complete before.

        Args:
            stage: index of the stage.
            waiting: parameters whose gradient is not complete.
        """
        identities = set(map(id, waiting))
        return tuple(
            number
            for number, bucket in enumerate(self._buckets[stage])
            if number not in self._closed[stage]
            and not any(id(parameter) in identities for _, parameter in bucket.named)
        )

    def complete_from(self, stage: int, layer: int) -> tuple[int, ...]:
        """The buckets of a stage, by index, whose parameters all belong to some layer or later
        ones, and that were not complete before.

        Args:
            stage: index of the stage.
            layer: index of the layer in the model.
        """
        return tuple(
            number
            for number, bucket in enumerate(self._buckets[stage])
            if number not in self._closed[stage] and bucket.first_layer >= layer
        )

    def open(self, stage: int) -> None:
        """Begin the gradients of a stage; called when the first backward there of a step, or of a
        reduction, is about to run."""
        for bucket in self._buckets[stage]:
            bucket.open()

    def keep_open(self, stage: int) -> None:
        """Give memory again to gradients of a stage that a hook of the user's has dropped; called
        before each further backward of a step."""
        for bucket in self._buckets[stage]:
            bucket.keep_open()

    def put_aside(self, stage: int, microbatch: int) -> None:
        """Keep what a microbatch has added to the gradients of a stage apart, see
        `GradientTree`.

        Args:
            stage: index of the stage.
            microbatch: index of the microbatch in its step, over all replicas.
        """
        for number, bucket in enumerate(self._buckets[stage]):
            if number not in self._closed[stage]:
                bucket.gradient.put_aside(bucket.first_leaf + microbatch)

    def close(
        self,
        stage: int,
        step: int | None,
        completed: Collection[int] | None,
        microbatch: int | None = None,
    ) -> None:
        """Note that the gradients of some buckets are complete on this rank.

        Args:
            stage: index of the stage that the buckets belong to.
            step: number of the step that they complete; None: they are those of a reduction before
                the last one.
            completed: indices of the buckets on the stage; None: all that were not complete before.
            microbatch: index of the microbatch, see `put_aside`, that has completed them; None: it
                is not kept apart.
        Raises:
            ModelError: a weight got a gradient after its bucket was complete.
        """
        closed = self._closed[stage]
        for number, bucket in enumerate(self._buckets[stage]):
            if number not in closed and (completed is None or number in completed):
                if microbatch is not None:
                    bucket.gradient.put_aside(bucket.first_leaf + microbatch)
                bucket.close()
                closed.add(number)
                if step is not None:
                    self._await(bucket, step)
        if completed is None:
            for bucket in self._buckets[stage]:
                bucket.check_unchanged()
            closed.clear()

    def part(self, message: Message) -> Any:
        """The payload of a message that brings a copy its part: its shards of this rank's gradient
        of the bucket. Where the library adds up, which parameters have a gradient here."""
        to = _copy_of(message)
        _, copy = sender_of(message.number, self._copies[to])
        bucket = self._senders[to, copy]
        if message.meaning is not Meaning.PART:
            return bucket.gradient.used
        if bucket.keeps_apart:
            return bucket.within.kept_for(to)
        return bucket.shard.part_for(to) if bucket.shard else bucket.within.part_for(to)

    def _await(self, bucket: Bucket, step: int) -> None:
        """Let sums from other ranks arrive in the memory of the gradient, but for those of a
        library; where there are shards, weights come instead."""
        if bucket.shard:
            self._expect_weights(bucket, step)
            return
        pipe, stage, number = bucket.me
        if (stage, number) in self._by_library:
            return
        copies = bucket.within.copies
        numbers = numbers_of(step, len(copies))
        for copy, buffers in bucket.within.buffers_for_sums():
            if copies[copy] not in self._here:  # what stays here never passes the transport
                self._land(Message(Meaning.SUM, stage, numbers[copy], pipe, number), buffers)

    def run(self, task: Task) -> Made:
        return self._run[task.kind](task)

    def _reduce(self, task: Task) -> Made:
        bucket = self._bucket_of(task)
        parts = self._from_copies(Meaning.PART, bucket.within.copies, task)
        if bucket.shard:
            bucket.shard.add_up(parts, self._step_completed_by(task.microbatch) is not None)
            return self._subtotals(bucket, task) if bucket.across else nothing
        add_up = bucket.within.add_up_kept if bucket.keeps_apart else bucket.within.add_up
        total = add_up(parts)
        if bucket.across:
            return self._subtotals(bucket, task)
        self._reducing.add(task)
        return self._to_near(bucket, total)

    def _subtotals(self, bucket: Bucket, task: Task) -> Made:
        """What each group gets of a shard that this one has added up, with the last reduce of a
        step."""
        across, step = self._across_of(task), self._step_completed_by(task.microbatch)
        if step is None:
            return nothing
        self._await_totals(across, bucket.me, step)
        self._reducing.add(task)
        return lambda message: across.subtotal_for(_copy_of(message))

    def _sum_across(self, task: Task) -> Made:
        across = self._across_of(task)
        total = across.add_up(self._from_copies(Meaning.SUBTOTAL, across.copies, task))
        self._reducing.add(task)
        return lambda message: total

    def _join(self, task: Task) -> Made:
        self._reducing.add(task)
        return self._to_near(self._bucket_of(task), self._take_totals(task))

    def _take_totals(self, task: Task) -> Shards:
        across = self._across_of(task)
        return across.take_totals(self._from_copies(Meaning.TOTAL, across.copies, task))

    def _to_near(self, bucket: Bucket, total: Shards) -> Made:
        """What each copy of the group gets of a shard that is added up."""

        def made(message: Message) -> Any:
            to = _copy_of(message)
            if to == bucket.me or to not in self._here:
                return total
            # Another copy on this rank reads it later, when this one may have stepped.
            return tuple(shard.clone() for shard in total)

        return made

    def _await_totals(self, across: SumAcross, me: BucketCopy, step: int) -> None:
        """Let totals from other groups arrive in the memory of the gradient."""
        pipe, stage, number = me
        numbers = numbers_of(step, len(across.copies))
        for place, buffers in across.buffers_for_totals():
            self._land(Message(Meaning.TOTAL, stage, numbers[place], pipe, number), buffers)

    def posted(self, task: Task) -> None:
        self._reducing.discard(task)

    def take_sums(self, task: Task) -> None:
        """Put the sums of all copies into the bucket of a task, which may write to them then."""
        bucket = self._bucket_of(task)
        if (task.stage, task.part) in self._by_library:
            bucket.gradient.show_total()
        elif bucket.shard and bucket.across:
            self._take_totals(task)
            bucket.gradient.show_total()
            self._leave_if_read(bucket)
        elif bucket.shard:
            return  # nobody else has the shard that was added up
        elif bucket.shared:
            bucket.within.take_sums(self._from_copies(Meaning.SUM, bucket.within.copies, task))
            self._leave_if_read(bucket)
        else:
            bucket.take_own()

    def _leave_if_read(self, bucket: Bucket) -> None:
        """Let the gradient go on in other memory if sums may still be sent from this one: a task
        that makes them may not have ended."""
        _, stage, number = bucket.me
        runs = any((one.stage, one.part) == (stage, number) for one in self._reducing)
        if runs or any(
            self._still_reads(memory, _wait_s(memory)) for memory in bucket.gradient.totals
        ):
            bucket.gradient.move_total()

    def _bucket_of(self, task: Task) -> Bucket:
        return self._buckets[task.stage][task.part]

    def _across_of(self, task: Task) -> SumAcross:
        across = self._bucket_of(task).across
        assert across is not None
        return across

    def _from_copies(self, meaning: Meaning, copies: Copies, task: Task) -> list[Any]:
        """The payloads that some copies of the task's bucket have sent for it, in their order."""
        return [
            self._mail.take(meaning, task.stage, number, task.part)
            for number in numbers_of(task.microbatch, len(copies))
        ]


def _copy_of(message: Message) -> BucketCopy:
    """The copy that a message is for."""
    return BucketCopy(message.pipe, message.stage, message.bucket)


def _wait_s(memory: Tensor) -> float:
    """Seconds that it is worth waiting before memory is copied; a GPU copies in no time."""
    return memory.nbytes / _COPY_BYTES_PER_S if is_on_host(memory) else 0.0
