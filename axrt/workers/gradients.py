"""Follows the gradients of buckets through a step, and adds them up over copies: an all-reduce by
messages.

Parts are the reduce-scatter: each copy sends every other copy the shard that it owns. Sums are the
all-gather: the owner of a shard sends its sum back. A bucket's parts leave when its own gradient is
complete, which may be before its stage's is.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from axrt.device import is_on_host
from axrt.scheduler.bucket import BucketCopy
from axrt.scheduler.message import Meaning, Message, numbers_of, sender_of
from axrt.scheduler.task import Kind, Task
from axrt.store.bucket import Bucket

from .worker import Land, Made, Mail, Worker, nothing

StillReads = Callable[[Tensor, float], bool]
# Bytes that a core copies in a second, about: waiting for the network may take as long as a copy.
_COPY_BYTES_PER_S = 4e9


class GradientWorker(Worker):
    """Sums shards, and takes their sums into buckets.

    Args:
        buckets: buckets of this rank, by stage.
        mail: payloads of the session.
        land: function that says into which memory the tensors of a message from another rank go,
            see `Transport.expect`.
        still_reads: function that says whether memory is still being sent, see
            `Transport.still_reads`.
        expect_weights: function that is called with a bucket whose shards are to be stepped, and
            the step, when its own gradient is complete.
        by_library: stage and index of each bucket that a library adds up.
        completes_step: function that says whether a reduction completes the gradient of a step.
    Attributes:
        leaving_in_parts: stages with a bucket that may leave before others are complete.
    """

    kinds = (Kind.REDUCE,)

    def __init__(
        self,
        buckets: Mapping[int, Sequence[Bucket]],
        mail: Mail,
        land: Land,
        still_reads: StillReads,
        expect_weights: Callable[[Bucket, int], None],
        by_library: Collection[tuple[int, int]] = (),
        completes_step: Callable[[int], bool] = lambda reduction: True,
    ) -> None:
        self.leaving_in_parts = {
            stage
            for stage, of in buckets.items()
            if len(of) > 1 and any(bucket.shared for bucket in of)
        }
        self._buckets, self._mail, self._land = buckets, mail, land
        self._still_reads, self._by_library = still_reads, by_library
        self._expect_weights = expect_weights
        self._completes_step = completes_step
        # By the copy that a part is for, and the number of the copy that sends it: tied weights
        # may be held twice here.
        self._senders: dict[tuple[BucketCopy, int], Bucket] = {
            (to, bucket.copies.index(bucket.me)): bucket
            for of in buckets.values()
            for bucket in of
            for to in bucket.copies
        }
        self._copies: dict[BucketCopy, int] = {
            to: len(bucket.copies) for (to, _), bucket in self._senders.items()
        }
        self._here = {bucket.me for of in buckets.values() for bucket in of}
        self._closed: dict[int, set[int]] = {stage: set() for stage in buckets}
        # The reduces that have started and whose sums have not left, by stage and bucket.
        self._reducing: set[tuple[int, int]] = set()

    def complete_without(self, stage: int, waiting: Collection[nn.Parameter]) -> tuple[int, ...]:
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

    def close(self, stage: int, step: int | None, completed: Collection[int] | None) -> None:
        """Note that the gradients of some buckets are complete on this rank.

        Args:
            stage: index of the stage that the buckets belong to.
            step: number of the step that they complete; None: they are those of a reduction before
                the last one.
            completed: indices of the buckets on the stage; None: all that were not complete before.
        Raises:
            ModelError: a weight got a gradient after its bucket was complete.
        """
        closed = self._closed[stage]
        for number, bucket in enumerate(self._buckets[stage]):
            if number not in closed and (completed is None or number in completed):
                bucket.close()
                closed.add(number)
                if step is not None and (stage, number) not in self._by_library:
                    self._await(bucket, step)
        if completed is None:
            for bucket in self._buckets[stage]:
                bucket.check_unchanged()
            closed.clear()

    def part(self, message: Message) -> Any:
        """The payload of a message that brings a copy its part: its shards of this rank's gradient
        of the bucket. Where the library adds up, which parameters have a gradient here."""
        to = BucketCopy(message.pipe, message.stage, message.bucket)
        _, copy = sender_of(message.number, self._copies[to])
        bucket = self._senders[to, copy]
        return bucket.part_for(to) if message.meaning is Meaning.PART else bucket.used

    def _await(self, bucket: Bucket, step: int) -> None:
        """Let sums from other ranks arrive in the memory of the gradient; where there are shards,
        weights come instead."""
        if bucket.shard:
            self._expect_weights(bucket, step)
            return
        pipe, stage, number = bucket.me
        numbers = numbers_of(step, len(bucket.copies))
        for copy, rooms in bucket.rooms_for_sums():
            if bucket.copies[copy] not in self._here:  # what stays here never passes the transport
                self._land(Message(Meaning.SUM, stage, numbers[copy], pipe, number), rooms)

    def run(self, task: Task) -> Made:
        bucket = self._buckets[task.stage][task.part]
        if bucket.shard:
            last = self._completes_step(task.microbatch)
            bucket.shard.add_up(self._from_copies(Meaning.PART, task), last)
            return nothing
        total = bucket.add_up(self._from_copies(Meaning.PART, task))
        self._reducing.add((task.stage, task.part))

        def made(message: Message) -> Any:
            to = BucketCopy(message.pipe, message.stage, message.bucket)
            if to == bucket.me or to not in self._here:
                return total
            # Another copy on this rank reads it later, when this one may have stepped.
            return tuple(shard.clone() for shard in total)

        return made

    def posted(self, task: Task) -> None:
        self._reducing.discard((task.stage, task.part))

    def take_sums(self, task: Task) -> None:
        """Put the sums of all copies into the bucket of a task, which may write to them then."""
        bucket = self._buckets[task.stage][task.part]
        if bucket.shard:
            return  # nobody else has the shard that was added up
        if (task.stage, task.part) in self._by_library:
            bucket.show_total()
        elif bucket.shared:
            bucket.take_sums(self._from_copies(Meaning.SUM, task))
            # The task may start behind a reduce that has not ended.
            if (task.stage, task.part) in self._reducing or self._is_still_read(bucket):
                bucket.move_gradient()
        else:
            bucket.take_own()

    def _is_still_read(self, bucket: Bucket) -> bool:
        return any(self._still_reads(memory, _wait_s(memory)) for memory in bucket.gradients)

    def _from_copies(self, meaning: Meaning, task: Task) -> list[Any]:
        """The payloads that the copies of the task's bucket have sent for it, in the order of
        copies."""
        copies = len(self._buckets[task.stage][task.part].copies)
        return [
            self._mail.take(meaning, task.stage, number, task.part)
            for number in numbers_of(task.microbatch, copies)
        ]


def _wait_s(memory: Tensor) -> float:
    """Seconds that it is worth waiting before memory is copied; a GPU copies in no time."""
    return memory.nbytes / _COPY_BYTES_PER_S if is_on_host(memory) else 0.0
