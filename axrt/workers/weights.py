"""Brings the weights of all shards together (ZeRO): an all-gather by messages; or weights from
scratch.

With stage 1 and 2 weights are always whole, and new ones come after each step. With stage 3 they
are whole for a stay: it begins when this copy sends its shard, and others' land beside it. Where
weights are in scratch, it begins when these have come.
"""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from axrt.scheduler.bucket import BucketCopy, alike
from axrt.scheduler.message import Meaning, Message, numbers_of
from axrt.scheduler.task import Kind, Task
from axrt.store.bucket import Bucket
from axrt.store.bucket_shard import BucketShard, Weights
from axrt.store.masters import Check

from .worker import Land, Made, Mail, Worker, nothing


class WeightsWorker(Worker):
    """Gathers weights, and sends and lets go of them where they are whole for stays alone.

    Args:
        buckets: buckets of this rank, by stage.
        land: function that says into which memory the tensors of a message from another rank go,
            see `Transport.expect`.
    """

    kinds = (Kind.BRING, Kind.SHARE, Kind.GATHER, Kind.RELEASE)

    def __init__(
        self,
        buckets: Mapping[int, Sequence[Bucket]],
        mail: Mail,
        land: Land,
        has_stays: bool,
        in_scratch: bool = False,
    ) -> None:
        self._buckets, self._mail, self._land = buckets, mail, land
        self._has_stays, self._in_scratch = has_stays, in_scratch
        self._checks: dict[Task, list[Check]] = {}  # of stays that have ended
        self._run: dict[object, Callable[[Task], Made]] = {
            Kind.BRING: self._bring,
            Kind.SHARE: self._share,
            Kind.GATHER: self._gather,
            Kind.RELEASE: self._release,
        }

    def run(self, task: Task) -> Made:
        return self._run[task.kind](task)

    def _bring(self, task: Task) -> Made:
        for bucket in self._buckets[task.stage]:
            bucket.begin_stay()
        return nothing

    def _share(self, task: Task) -> Made:
        if not self._in_scratch:
            self._bring(task)
        sent: list[Weights] = []
        for bucket in self._buckets[task.stage]:
            shard = shard_of(bucket)
            self._expect(bucket, task.microbatch, dict(shard.rooms_for_weights()))
            sent.append(shard.weights)
        return lambda message: sent[message.bucket]

    def _gather(self, task: Task) -> Made:
        _, stage, number, part = task
        bucket = self._buckets[stage][part]
        if self._has_stays:
            self._expect(bucket, number, {})  # what came too early for its memory has other memory
        numbers = numbers_of(number, len(alike(bucket.near, bucket.me)))
        shard_of(bucket).take_weights(
            [self._mail.take(Meaning.WEIGHTS, stage, one, part) for one in numbers]
        )
        return nothing

    def _release(self, task: Task) -> Made:
        self._checks[task] = [bucket.end_stay() for bucket in self._buckets[task.stage]]
        return nothing

    def complete(self, task: Task, made: Made) -> Made:
        for check in self._checks.pop(task, ()):
            check()
        return made

    def expect_new(self, bucket: Bucket, step: int) -> None:
        """Let the weights that follow a step land where layers read them, which no backward of the
        step does any more; where they are whole for stays alone they come later."""
        if not self._has_stays:
            self._expect(bucket, step, dict(shard_of(bucket).rooms_for_weights()))

    def _expect(
        self, bucket: Bucket, number: int, rooms: Mapping[BucketCopy, Sequence[Tensor]]
    ) -> None:
        """Let the weights of a step or stay land in some memory, by the copy that sends them; ()
        where there is none, or none any more."""
        pipe, stage, part = bucket.me
        copies = alike(bucket.near, bucket.me)
        for copy, one in zip(copies, numbers_of(number, len(copies)), strict=True):
            if copy != bucket.me:  # what stays here never passes the transport
                message = Message(Meaning.WEIGHTS, stage, one, pipe, part)
                self._land(message, rooms.get(copy, ()))


def shard_of(bucket: Bucket) -> BucketShard:
    """The shard of a bucket, which has one."""
    assert bucket.shard is not None
    return bucket.shard
