"""A snapshot: a copy of what a save writes, made on the host while training goes on."""

#   take     each tensor gets a copy to come, without memory
#   begin    copies get memory of the arena, and are put on a queue, bucket by bucket
#   copied   all copies have the values that the tensors had when it began
#
# No tensor may change before it is copied. So each bucket is lent to its copy, and its next step
# waits for that. The arena is kept for the next snapshot, so nothing is allocated after the first
# one with all of the state. On a CPU the first copies touch it, not the call: the system takes half
# a second to give a gigabyte.
#
# A save is a coroutine, a generator that yields what it waits for: copies, files on a thread,
# control messages of other ranks. The loop lets it go on once a round, so a save that is waited for
# and one that is not are one text. The bucket is lent to its copy (`Loans.lend`), and whoever
# writes to it ends the loan first: its step, a load, a dropped step, `close`. No row of the table
# says so, since a save is asked for between steps, and waiting for one's own bucket cannot close a
# circle. A version counter tells where somebody else has written. Offloaded state is read where it
# rests, by the thread, so no slot is taken. With shards the rank that writes a layer asks for
# nothing: all go through layers in one order, and nobody tells the next before this one is written.
# The main rank alone says whether a save is still under way: it has heard of all files by then, so
# every rank's arena is free.

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from axrt.device.device import CPU
from axrt.device.queues import NOW, DeviceStream, Moment, Queue, moment_of, wait_for
from axrt.device.thread_queue import ThreadQueue
from axrt.offload.arena import Stretch
from axrt.offload.memory import MemoryArena, aligned
from axrt.store.bucket import Bucket
from axrt.store.flat import hollow

from .layers import Live

_ALIGNMENT_BYTES = 64  # of each copy; more than any type needs
_NO_BYTES = torch.empty(0, dtype=torch.uint8)


class Lent:
    """Tensors that are read until a moment, while nobody but their optimizers may write to them.

    Args:
        tensors: the tensors, each with the bucket that steps it, if any.
    Attributes:
        fault: what is wrong with what was read; "" where nothing is.
    """

    def __init__(self, tensors: Iterable[Live]) -> None:
        self._versions: dict[Bucket | None, list[tuple[Tensor, int]]] = {}
        for live in tensors:
            known = self._versions.setdefault(live.bucket, [])
            known.append((live.value, live.value._version))
        self.fault = ""

    def until(self, queue: Queue, read: Callable[[], object]) -> Moment:
        """Let tensors be read on a queue; returns the end of that."""
        queue.after(moment_of([tensor for of in self._versions.values() for tensor, _ in of]))
        moment = queue.put(read)
        for bucket in self._versions:
            self.lend(bucket, moment)
        return moment

    def lend(self, bucket: Bucket | None, until: Moment) -> None:
        """Let the tensors of a bucket be read until a moment."""
        if bucket:
            bucket.loans.lend(self, until, partial(self._check, bucket))

    def end(self) -> None:
        """Note a fault where somebody has written to a tensor before all were read, which they
        are."""
        for bucket in self._versions:
            if bucket:
                bucket.loans.end(self)
        self._check(None)
        self._versions = {}

    def _check(self, bucket: Bucket | None) -> None:
        for tensor, version in self._versions.get(bucket, ()):
            if tensor._version != version:
                self.fault = (
                    f"a tensor of shape {tuple(tensor.shape)} was written to before it was copied "
                    "for the checkpoint, by a layer or by the user; expected that optimizers alone "
                    "write to weights, or checkpoint.background = 'off' and "
                    "checkpoint.memory_every = 0"
                )


class SnapshotArena:
    """Memory of the host for one snapshot at a time, and the queue that fills it.

    Args:
        apart: True if state is on a disk, so that a copy holds up who calls.
    """

    def __init__(self, device: torch.device, apart: bool) -> None:
        self._device = device
        self.queue: Queue = (
            ThreadQueue("axrt snapshot", device) if apart or device == CPU else DeviceStream(device)
        )
        self._memory = _NO_BYTES

    @property
    def num_bytes(self) -> int:
        """Size of the memory."""
        return self._memory.numel()

    def of_size(self, num_bytes: int) -> Tensor:
        """Memory of that size, uint8."""
        if self.num_bytes < num_bytes:
            self._memory = _NO_BYTES  # before there is another
            self._memory = self._new(num_bytes)
        return self._memory[:num_bytes]

    def _new(self, num_bytes: int) -> Tensor:
        if self._device == CPU:
            return aligned(num_bytes, CPU)
        return MemoryArena(num_bytes, CPU, pinned=True).bytes_of(Stretch(0, num_bytes))


class Snapshot:
    """Copies of tensors on the host.

    Attributes:
        copied: moment at which all copies have their values; `end` comes then.
    """

    def __init__(self, arena: SnapshotArena) -> None:
        self._arena = arena
        self._of_buckets: dict[Bucket | None, list[_Copy]] = {}
        self._at_once: list[_Copy] = []
        self._lent = Lent(())
        self.copied: Moment = NOW

    def take(self, live: Live) -> Tensor:
        """The copy of a tensor, which has its values when all are copied; of what forwards write
        to, when `begin` returns."""
        one = _Copy(live, hollow(live.value.detach(), device=CPU))
        (self._at_once if live.changes else self._of_buckets.setdefault(live.bucket, [])).append(
            one
        )
        return one.copy

    def begin(self) -> None:
        """Give copies memory, and begin to copy."""
        later = [one for copies in self._of_buckets.values() for one in copies]
        self._give_memory([one.copy for one in (*later, *self._at_once)])
        _fill(self._at_once, _as_it_is)
        self._lent = Lent([one.live for one in later])
        queue = self._arena.queue
        queue.after(moment_of([one.live.value for one in (*later, *self._at_once)]))
        for bucket, copies in self._of_buckets.items():
            values = bucket.route.at_rest if bucket else _as_it_is
            self._lent.lend(bucket, queue.put(partial(_fill, copies, values)))
        self.copied = queue.put(_nothing)

    def end(self) -> None:
        """Wait for the copies, and note a fault where somebody has written to a tensor before."""
        wait_for(self.copied)
        self._lent.end()
        self._of_buckets, self._at_once = {}, []

    @property
    def fault(self) -> str:
        """What is wrong with the copies; "" where nothing is."""
        return self._lent.fault

    def _give_memory(self, copies: Sequence[Tensor]) -> None:
        sizes = [_aligned(copy.numel() * copy.itemsize) for copy in copies]
        memory = self._arena.of_size(sum(sizes))
        for copy, start in zip(copies, accumulate(sizes, initial=0), strict=False):
            end = start + copy.numel() * copy.itemsize
            copy.data = memory[start:end].view(copy.dtype).view(copy.shape)


class _Copy(NamedTuple):
    """A tensor, and its copy on the host."""

    live: Live
    copy: Tensor


def _as_it_is(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return tensors


def _fill(copies: Sequence[_Copy], values: Callable[[Sequence[Tensor]], Sequence[Tensor]]) -> None:
    with torch.no_grad():
        for one, value in zip(copies, values([of.live.value for of in copies]), strict=True):
            one.copy.copy_(value, non_blocking=True)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _nothing() -> None:
    pass
