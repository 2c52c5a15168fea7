"""What the state of an optimizer takes on each tier, with and without `memory.offload`."""

from collections.abc import Iterator, Sequence

from axrt.config import Config, Memory
from axrt.scheduler.rules.offload import SLOTS

from .ledger import Entry, Purpose, Tier
from .parameters import BucketBytes

_PAGE = 4096


def state_entries(config: Config, buckets: Sequence[BucketBytes], at_once: bool) -> Iterator[Entry]:
    """Masters, moments, factors, totals and slots of a rank.

    Args:
        at_once: True where each bucket waits with its whole gradient for the norm of all.
    """
    factors = Tier.HOST if config.memory.steps_on_host else Tier.DEVICE
    yield Entry(Purpose.FACTORS, factors, sum(bucket.factors for bucket in buckets))
    if config.memory.offload == "none":
        yield from _on_device(buckets, at_once)
        return
    scratch = scratch_of(config.memory)
    shared = sum(bucket.total for bucket in buckets if bucket.copies > 1)
    stepped = [bucket for bucket in buckets if bucket.weights]
    most = min(SLOTS, len(stepped))
    yield Entry(Purpose.TOTALS, Tier.DEVICE, shared)
    if config.memory.steps_on_host:
        slot = max(map(_host_slot_bytes, stepped), default=0)
        yield Entry(Purpose.GRADIENTS, Tier.HOST, most * slot)
    else:
        slot = max(map(_slot_bytes, stepped), default=0)
        yield Entry(Purpose.SLOTS, Tier.DEVICE, most * slot)
    for bucket in buckets:
        yield Entry(Purpose.MASTERS, scratch, _pages(bucket.masters))
        yield Entry(Purpose.MOMENTS, scratch, _moments(bucket))
        yield Entry(Purpose.WEIGHTS, scratch, sum(map(_pages, bucket.stored)))


def scratch_of(memory: Memory) -> Tier:
    """The tier of what is offloaded."""
    return Tier.DISK if memory.scratch_directory else Tier.HOST


def _on_device(buckets: Sequence[BucketBytes], at_once: bool) -> Iterator[Entry]:
    def waits(bucket: BucketBytes) -> bool:
        """Its total is there before its step, along with others."""
        return at_once or bucket.copies > 1

    most = max((bucket.total for bucket in buckets if not waits(bucket)), default=0)
    yield Entry(Purpose.TOTALS, Tier.DEVICE, sum(b.total for b in buckets if waits(b)) + most)
    yield Entry(Purpose.MASTERS, Tier.DEVICE, sum(bucket.masters for bucket in buckets))
    yield Entry(Purpose.MOMENTS, Tier.DEVICE, sum(sum(b.moments or ()) for b in buckets))


def _slot_bytes(bucket: BucketBytes) -> int:
    """What a bucket takes on the device for its step: masters, moments, weights where they are in
    scratch, and its total gradient where no copies are added up in one before."""
    kept = _pages(bucket.masters) + _moments(bucket) + sum(map(_pages, bucket.stored))
    return kept + _host_slot_bytes(bucket)


def _host_slot_bytes(bucket: BucketBytes) -> int:
    """A total gradient that is made for the step alone."""
    return _pages(bucket.total) if bucket.copies == 1 else 0


def _moments(bucket: BucketBytes) -> int:
    return sum(map(_pages, bucket.moments or ()))


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE
