"""A snapshot: a copy of what a save writes, made on the host while training goes on.

    take     each tensor gets a copy to come, without memory
    begin    copies get memory of the arena, and are put on a queue, bucket by bucket
    copied   all copies have the values that the tensors had when it began

No tensor may change before it is copied. So each bucket is lent to its copy, and its next step
waits for that. The arena is kept for the next snapshot, so nothing is allocated after the first one
with all of the state.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from axrt.device import CPU
from axrt.offload.arena import Stretch
from axrt.offload.memory import MemoryArena
from axrt.queues import NOW, DeviceStream, Moment, Queue, moment_of, wait_for
from axrt.store.bucket import Bucket
from axrt.store.flat import hollow
from axrt.thread_queue import ThreadQueue

_ALIGNMENT_BYTES = 64  # of each copy; more than any type needs


class _Taken(NamedTuple):
    """A tensor and its copy.

    Args:
        live: the tensor.
        copy: its copy on the host.
        version: how often the tensor had been written to.
    """

    live: Tensor
    copy: Tensor
    version: int

    @property
    def has_changed(self) -> bool:
        """Somebody has written to the tensor since."""
        return self.live._version != self.version


class SnapshotArena:
    """Memory of the host for one snapshot at a time, and the queue that fills it.

    Args:
        device: device that tensors are on.
        apart: True if state is on a disk, so that a copy holds up who calls.
    """

    def __init__(self, device: torch.device, apart: bool) -> None:
        self._device = device
        self.queue: Queue = (
            ThreadQueue("axrt snapshot", device) if apart or device == CPU else DeviceStream(device)
        )
        self._memory: MemoryArena | None = None

    @property
    def num_bytes(self) -> int:
        """Size of the memory."""
        return self._memory.num_bytes if self._memory else 0

    def of_size(self, num_bytes: int) -> Tensor:
        """Memory of that size, uint8."""
        if self._memory is None or self._memory.num_bytes < num_bytes:
            self._memory = None  # before there is another
            self._memory = MemoryArena(num_bytes, CPU, pinned=self._device != CPU)
        return self._memory.bytes_of(Stretch(0, num_bytes))


class Snapshot:
    """Copies of tensors on the host.

    Args:
        arena: memory for them, which no other snapshot uses now.
    Attributes:
        copied: moment at which all copies have their values; `end` comes then.
        fault: what is wrong with them; "" where nothing is.
    """

    def __init__(self, arena: SnapshotArena) -> None:
        self._arena = arena
        self._of_buckets: dict[Bucket | None, list[_Taken]] = {}
        self._at_once: list[_Taken] = []
        self.copied: Moment = NOW
        self.fault = ""

    def take(self, live: Tensor, bucket: Bucket | None, changes: bool = False) -> Tensor:
        """The copy of a tensor, which has its values when all are copied.

        Args:
            live: the tensor.
            bucket: bucket that steps it; None: nobody does.
            changes: True if forwards write to it, so that `begin` copies it at once.
        """
        taken = _Taken(live, hollow(live.detach(), device=CPU), live._version)
        (self._at_once if changes else self._of_buckets.setdefault(bucket, [])).append(taken)
        return taken.copy

    def begin(self) -> None:
        """Give copies memory, and begin to copy."""
        every = [one for taken in (*self._of_buckets.values(), self._at_once) for one in taken]
        self._give_memory([one.copy for one in every])
        _copy(self._at_once, _as_it_is)
        queue = self._arena.queue
        queue.after(moment_of([one.live for one in every]))
        for bucket, taken in self._of_buckets.items():
            values = bucket.at_rest if bucket else _as_it_is
            copied = queue.put(partial(_copy, taken, values))
            if bucket:
                bucket.lend(copied, partial(self._check, taken))
        self.copied = queue.put(_nothing)

    def end(self) -> None:
        """Wait for the copies, and note a fault where somebody has written to a tensor before."""
        wait_for(self.copied)
        for bucket in self._of_buckets:
            if bucket:
                bucket.end_loan()
        self._check(self._of_buckets.pop(None, []))
        self._of_buckets, self._at_once = {}, []

    def _give_memory(self, copies: Sequence[Tensor]) -> None:
        sizes = [_aligned(copy.numel() * copy.itemsize) for copy in copies]
        memory = self._arena.of_size(sum(sizes))
        for copy, start in zip(copies, accumulate(sizes, initial=0), strict=False):
            end = start + copy.numel() * copy.itemsize
            copy.data = memory[start:end].view(copy.dtype).view(copy.shape)

    def _check(self, taken: Sequence[_Taken]) -> None:
        for one in taken:
            if one.has_changed:
                self.fault = (
                    f"a tensor of shape {tuple(one.live.shape)} was written to before it was "
                    "copied for the checkpoint, by a layer or by the user; expected that "
                    "optimizers alone write to weights, or checkpoint.background = 'off'"
                )


def _as_it_is(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return tensors


def _copy(taken: Sequence[_Taken], values: Callable[[Sequence[Tensor]], Sequence[Tensor]]) -> None:
    with torch.no_grad():
        for one, value in zip(taken, values([one.live for one in taken]), strict=True):
            one.copy.copy_(value, non_blocking=True)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _nothing() -> None:
    pass
