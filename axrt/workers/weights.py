"""Brings the weights of all shards together (ZeRO): an all-gather by messages; or weights from
scratch."""

# With stage 1 and 2 weights are always whole, and new ones come after each step. With stage 3 they
# are whole for a residency: it begins when this copy sends its shard, and others' land beside it.
# Where weights are in scratch, it begins when these have come.
#
# Weights land where layers read them, from the end of the bucket's last backward on. A copy of tied
# weights takes weights from its own layer's copies. Between steps a layer is made whole by
# messages, one at a time: for a checkpoint on the rank that writes, at the end on all
# (`shard_exchange.py`).
#
# Weights that come and go (ZeRO stage 3). Which residencies a step has is decided
# before anything runs, so all copies of a stage have the same ones, and an all-gather needs no
# asking: a copy sends its shard when it has room, and has all others' when they have room. Layers
# and graphs keep views of flat memory, whose storage is resized to nothing and back: autograd's
# saved weights see the new values. Versions of parameters do not change with that. The shard's own
# weights have memory of their own, which float32 masters are. It is lent to the network, as all
# copies have it before their last backward of the step, and its step needs their parts. Where a
# step is dropped whole weights and shards go on in other memory, since the network may still read
# and write these. On a device memory belongs to the stream on which it was taken, and the stream
# that lets it go is recorded on it. Whether a layer has written to weights is computed there, and
# the host reads it when the release has ended.
#
# Weights in scratch (`memory.offload_parameters`). Residencies are the same; a bring takes the
# place of the share, or comes before it. A slot has room for the weights that a step makes, and
# they are stored with the state. Weights that are not narrow are the masters, and are there once. A
# gradient is let go by the step. So that slow copies of state do not pile gradients up, a stage's
# last residency of a step lasts until it has stepped, and the next stage has no room before. A
# digest of what has come tells at the end of the residency that nobody wrote there. What a stage
# hands on of its own weights is a copy, also in evaluations. These bring stages on demand, since
# their number of microbatches is known to readers alone.

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from axrt.scheduler.bucket import BucketCopy, alike
from axrt.scheduler.message import Meaning, Message, numbers_of
from axrt.scheduler.task import Kind, Task
from axrt.store.bucket import Bucket
from axrt.store.bucket_shard import BucketShard, Weights
from axrt.store.whole_weights import Check

from .worker import Land, Made, Mail, Worker, nothing


class WeightsWorker(Worker):
    """Gathers weights, and sends and lets go of them where they are whole for residencies alone.

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
        has_residencies: bool,
        in_scratch: bool = False,
    ) -> None:
        self._buckets, self._mail, self._land = buckets, mail, land
        self._has_residencies, self._in_scratch = has_residencies, in_scratch
        self._checks: dict[Task, list[Check]] = {}  # of residencies that have ended
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
            bucket.begin_residency()
        return nothing

    def _share(self, task: Task) -> Made:
        if not self._in_scratch:
            self._bring(task)
        sent: list[Weights] = []
        for bucket in self._buckets[task.stage]:
            shard = shard_of(bucket)
            self._expect(bucket, task.microbatch, dict(shard.buffers_for_weights()))
            sent.append(shard.weights)
        return lambda message: sent[message.bucket]

    def _gather(self, task: Task) -> Made:
        _, stage, number, part = task
        bucket = self._buckets[stage][part]
        if self._has_residencies:
            self._expect(bucket, number, {})  # what came too early for its memory has other memory
        numbers = numbers_of(number, len(alike(bucket.within.copies, bucket.me)))
        shard_of(bucket).take_weights(
            [self._mail.take(Meaning.WEIGHTS, stage, one, part) for one in numbers]
        )
        return nothing

    def _release(self, task: Task) -> Made:
        self._checks[task] = [bucket.end_residency() for bucket in self._buckets[task.stage]]
        return nothing

    def complete(self, task: Task, made: Made) -> Made:
        for check in self._checks.pop(task, ()):
            check()
        return made

    def expect_new(self, bucket: Bucket, step: int) -> None:
        """Let the weights that follow a step land where layers read them, which no backward of the
        step does any more; where they are whole for residencies alone they come later."""
        if not self._has_residencies:
            self._expect(bucket, step, dict(shard_of(bucket).buffers_for_weights()))

    def _expect(
        self, bucket: Bucket, number: int, buffers: Mapping[BucketCopy, Sequence[Tensor]]
    ) -> None:
        """Let the weights of a step or residency land in some memory, by the copy that sends them;
        () where there is none, or none any more."""
        pipe, stage, part = bucket.me
        copies = alike(bucket.within.copies, bucket.me)
        for copy, one in zip(copies, numbers_of(number, len(copies)), strict=True):
            if copy != bucket.me:  # what stays here never passes the transport
                message = Message(Meaning.WEIGHTS, stage, one, pipe, part)
                self._land(message, buffers.get(copy, ()))


def shard_of(bucket: Bucket) -> BucketShard:
    """The shard of a bucket, which has one."""
    assert bucket.shard is not None
    return bucket.shard
