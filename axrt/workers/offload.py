"""Brings the offloaded state of a bucket to the device, and takes it back; or takes its gradient to
the host."""

from collections.abc import Mapping, Sequence

from axrt.scheduler.task import Kind, Task
from axrt.store.bucket import Bucket

from .worker import Made, Worker, nothing


class OffloadWorker(Worker):
    """Copies between scratch and slots, and of gradients to the host.

    Args:
        buckets: buckets of this rank, by stage.
    """

    kinds = (Kind.FETCH, Kind.STORE, Kind.UNLOAD)

    def __init__(self, buckets: Mapping[int, Sequence[Bucket]]) -> None:
        self._buckets = buckets

    def run(self, task: Task) -> Made:
        bucket = self._buckets[task.stage][task.part]
        if task.kind is Kind.UNLOAD:
            bucket.route.unload()
        elif task.kind is Kind.FETCH:
            bucket.route.fetch()
        else:
            bucket.route.store()
        return nothing

    def complete(self, task: Task, made: Made) -> Made:
        if task.kind is Kind.STORE:
            self._buckets[task.stage][task.part].route.leave_slot()
        return made
