"""Adds gradients of buckets up by a library's collectives, each on its ticket: by an all-reduce, or
by a reduce-scatter where copies own shards."""

# Nobody issues before all gradients are ready; a rank in a long task issues late. A step whose data
# end cannot have come so far, so none is dropped within a collective. While one is under way the
# loop asks for signs of life of the ranks in it, since the library itself waits without a limit.
# Gradients of narrower types than float32 are added up in float32. Where copies own shards the
# collective is a reduce-scatter, and new weights travel as messages. Groups come up from MPI's
# ranks: rank 0 keeps a store on a port that the system chooses. Buckets of which one rank holds
# several copies stay with parts. In tests, ranks of one process meet in `local_collectives.py`,
# which finds out another order.

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from axrt.device.device import is_on_host
from axrt.device.queues import current_stream
from axrt.scheduler.bucket import Copies
from axrt.scheduler.message import Meaning, Message, numbers_of
from axrt.scheduler.task import Kind, Task
from axrt.store.bucket import Bucket
from axrt.store.gradient import Used, used_by_any
from axrt.transport.collectives import CollectiveQueue, Group

from .worker import Made, Mail, Worker, nothing

Which = tuple[int, int]


class CollectiveWorker(Worker):
    """Gives out tickets on the lowest rank of a group, and issues the collective of a bucket.

    What is ready says which parameters have a gradient; a ticket says which have one on any rank.

    Args:
        buckets: buckets of this rank, by stage.
        groups: group of ranks of each bucket that the library adds up, by stage and bucket.
        by_rank: function that gives the copies of a bucket in the order of their ranks.
    """

    kinds = (Kind.ANNOUNCE, Kind.COLLECT)

    def __init__(
        self,
        buckets: Mapping[int, Sequence[Bucket]],
        groups: Mapping[Which, Group],
        by_rank: Callable[[Copies], Copies],
        queue: CollectiveQueue,
        mail: Mail,
    ) -> None:
        self._buckets, self._groups, self._queue, self._mail = buckets, groups, queue, mail
        self._by_rank = by_rank
        self._used: dict[Which, Used] = {}
        # What is being added up: memory of the sum, and what else the library reads.
        self._wide: dict[Which, list[tuple[Tensor, list[Tensor]]]] = {}
        self._run: dict[object, Callable[[Task], Made]] = {
            Kind.ANNOUNCE: self._announce,
            Kind.COLLECT: self._collect,
        }

    def hear_ticket(self, message: Message, used: Used) -> None:
        """Keep which parameters of a bucket have a gradient on some rank."""
        self._used[message.stage, message.bucket] = used

    def run(self, task: Task) -> Made:
        return self._run[task.kind](task)

    def _announce(self, task: Task) -> Made:
        _, stage, step, bucket = task
        numbers = numbers_of(step, len(self._buckets[stage][bucket].copies))
        used = used_by_any(
            [self._mail.take(Meaning.READY, stage, number, bucket) for number in numbers]
        )
        return lambda message: used

    def _collect(self, task: Task) -> Made:
        _, stage, step, bucket = task
        of = self._buckets[stage][bucket]
        _, first, number = of.copies[0]
        what = f"bucket {number} of stage {first} at step {step}"
        of.gradient.set_used(self._used.pop((stage, bucket)))
        issue = self._reduce_scatter if of.shard else self._all_reduce
        self._wide[stage, bucket] = issue(of, self._groups[stage, bucket], what)
        return nothing

    def _all_reduce(
        self, bucket: Bucket, group: Group, what: str
    ) -> list[tuple[Tensor, list[Tensor]]]:
        totals = bucket.gradient.widen()
        for total in totals:
            if total.numel():
                self._queue.issued(group.all_reduce(total, what))
        return [(total, []) for total in totals]

    def _reduce_scatter(
        self, bucket: Bucket, group: Group, what: str
    ) -> list[tuple[Tensor, list[Tensor]]]:
        assert bucket.shard is not None
        scattered = bucket.shard.scattered(self._by_rank(bucket.copies))
        for mine, shards in scattered:
            if any(shard.numel() for shard in shards):
                self._queue.issued(group.reduce_scatter(mine, shards, what))
        return scattered

    def complete(self, task: Task, made: Made) -> Made:
        if task.kind is Kind.COLLECT:
            totals = [total for total, _ in self._wide.pop((task.stage, task.part))]
            for total in totals:
                if total.numel() and not is_on_host(
                    total
                ):  # it may have been made on the queue of collectives
                    total.record_stream(current_stream(total.device))
            bucket = self._buckets[task.stage][task.part]
            (bucket.shard.take_sum if bucket.shard else bucket.gradient.take_widened)(totals)
        return made
