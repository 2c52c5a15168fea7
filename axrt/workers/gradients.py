"""Follows the gradients of buckets through a step, and adds them up over copies: an all-reduce by
messages.

Parts are the reduce-scatter: each copy sends every other its shard of the gradient. Sums are the
all-gather: who owns a shard sends its sum back. A bucket's parts leave when its own gradient is
complete, which may be before its stage's is.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from axrt.scheduler.bucket import BucketCopy
from axrt.scheduler.message import Meaning, Message
from axrt.scheduler.task import Kind, Task
from axrt.store.bucket import Bucket

from .worker import Made, Mail, Worker

Land = Callable[[Message, Sequence[Tensor]], None]


class GradientWorker(Worker):
    """Sums shards, and takes their sums into buckets.

    Args:
        buckets: of this rank, by stage.
        mail: of the session.
        land: the tensors that come with a message from another rank are to be put into these.
    """

    kinds = (Kind.REDUCE,)

    def __init__(self, buckets: Mapping[int, Sequence[Bucket]], mail: Mail, land: Land) -> None:
        self._buckets, self._mail, self._land = buckets, mail, land
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

    def leaves_in_parts(self, stage: int) -> bool:
        """Some bucket of the stage may leave before others are complete."""
        buckets = self._buckets[stage]
        return len(buckets) > 1 and any(bucket.shared for bucket in buckets)

    def complete_without(self, stage: int, waiting: Collection[nn.Parameter]) -> tuple[int, ...]:
        """The buckets of a stage that have none of these parameters, and were not complete
        before."""
        identities = set(map(id, waiting))
        return tuple(
            number
            for number, bucket in enumerate(self._buckets[stage])
            if number not in self._closed[stage]
            and not any(id(parameter) in identities for _, parameter in bucket.named)
        )

    def complete_from(self, stage: int, layer: int) -> tuple[int, ...]:
        """The buckets of a stage whose parameters are all of this layer of the model or later ones,
        and were not complete before."""
        return tuple(
            number
            for number, bucket in enumerate(self._buckets[stage])
            if number not in self._closed[stage] and bucket.first_layer >= layer
        )

    def open(self, stage: int) -> None:
        """A step's first backward on the stage is about to run."""
        for bucket in self._buckets[stage]:
            bucket.open()

    def close(self, stage: int, step: int, completed: Collection[int] | None) -> None:
        """The gradients of buckets are complete on this rank.

        Args:
            stage: whose buckets they are.
            step: of the run.
            completed: the numbers of the buckets; None: all that were not complete before.
        """
        closed = self._closed[stage]
        for number, bucket in enumerate(self._buckets[stage]):
            if number not in closed and (completed is None or number in completed):
                bucket.close()
                closed.add(number)
                self._await_sums(bucket, step)
        if completed is None:
            for bucket in self._buckets[stage]:
                bucket.check_unchanged()
            closed.clear()

    def part(self, message: Message) -> Any:
        """What the message brings to a copy: its shards of this rank's gradient of the bucket."""
        to = BucketCopy(message.pipe, message.stage, message.bucket)
        return self._senders[to, message.number % self._copies[to]].part_for(to)

    def _await_sums(self, bucket: Bucket, step: int) -> None:
        """Sums from other ranks arrive where the gradient is."""
        pipe, stage, number = bucket.me
        for copy, rooms in bucket.rooms_for_sums():
            if bucket.copies[copy] not in self._here:  # what stays here never passes the transport
                which = step * len(bucket.copies) + copy
                self._land(Message(Meaning.SUM, stage, which, pipe, number), rooms)

    def run(self, task: Task) -> Made:
        total = self._buckets[task.stage][task.part].add_up(self._from_copies(Meaning.PART, task))
        return lambda message: total

    def take_sums(self, task: Task) -> None:
        """Put the sums of all copies into the bucket of a task."""
        bucket = self._buckets[task.stage][task.part]
        if bucket.shared:
            bucket.take_sums(self._from_copies(Meaning.SUM, task))

    def _from_copies(self, meaning: Meaning, task: Task) -> list[Any]:
        """What each copy of the task's bucket has sent for it, in the order of copies."""
        copies = len(self._buckets[task.stage][task.part].copies)
        numbers = range(task.microbatch * copies, (task.microbatch + 1) * copies)
        return [self._mail.take(meaning, task.stage, number, task.part) for number in numbers]
