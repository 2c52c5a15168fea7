"""Brings the offloaded state of a bucket to the device, and takes it back; or takes its gradient to
the host."""

from collections.abc import Mapping, Sequence

from axrt.scheduler.task import AnyKind, Kind, Task
from axrt.store.bucket import Bucket

from .expectation import Expectation
from .worker import Made, Worker, nothing


class OffloadWorker(Worker):
    """Copies between scratch and slots, and of gradients to the host.

    Where steps are tried before their vote, a bucket's state comes and goes once a step if the
    expectation is right: around the step if it is tried, else around its commit. If the expectation
    is wrong, it comes and goes twice.

    Args:
        buckets: buckets of this rank, by stage.
        expectation: what the rank expects of votes; None where no step is tried.
    """

    kinds = (Kind.FETCH, Kind.STORE, Kind.REFETCH, Kind.RESTORE, Kind.UNLOAD)

    def __init__(
        self,
        buckets: Mapping[int, Sequence[Bucket]],
        expectation: Expectation | None = None,
    ) -> None:
        self._buckets, self._expectation = buckets, expectation
        self._copies: set[tuple[AnyKind, int, int]] = set()  # stores that have something to carry

    def run(self, task: Task) -> Made:
        kind, stage, step, part = task
        bucket = self._buckets[stage][part]
        if kind is Kind.UNLOAD:
            bucket.unload()
        elif kind in _BACK:
            if (kind, stage, part) in self._copies:
                bucket.store()
        elif self._comes(kind, step, bucket):
            bucket.fetch()
            self._copies.add((_BACK_OF[kind], stage, part))
        return nothing

    def complete(self, task: Task, made: Made) -> Made:
        kind, stage, _, part = task
        if (kind, stage, part) in self._copies:
            self._copies.remove((kind, stage, part))
            self._buckets[stage][part].leave_slot()
        return made

    def _comes(self, kind: AnyKind, step: int, bucket: Bucket) -> bool:
        """The bucket's state is needed on the device now."""
        expected = self._expectation
        if expected is None:
            return True
        tried = expected.tries(step) and bucket.may_try
        return tried if kind is Kind.FETCH else not (bucket.is_tried and expected.is_plain(step))


_BACK_OF: dict[AnyKind, AnyKind] = {Kind.FETCH: Kind.STORE, Kind.REFETCH: Kind.RESTORE}
_BACK = tuple(_BACK_OF.values())
