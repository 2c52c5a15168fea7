"""Slots: memory on the device into which the offloaded state of a bucket comes for its step; or
slots on the host, into which its gradient comes for a step there."""

# The brain counts them (`scheduler/rules/offload.py`, `host_steps.py`), so while tasks run one is
# free whenever one is taken.

from collections import deque

import torch
from torch import Tensor

from axrt.device.queues import moment_of, wait_for
from axrt.offload.arena import Stretch
from axrt.offload.memory import MemoryArena
from axrt.offload.tier import Tier


class Slots:
    """The slots of a rank, each as large as the largest bucket's state.

    Args:
        pinned: True for memory of the host that an accelerator copies from and to.
    """

    def __init__(self, tier: Tier, device: torch.device, pinned: bool = False) -> None:
        self.tier, self._device, self._pinned = tier, device, pinned
        self._count = 1  # while buckets are built
        self._num_bytes = 0
        self._free: deque[Tensor] = deque()  # another thread may take while one is given
        self._taken: dict[int, Tensor] = {}  # by identity: empty slots have one address

    @property
    def num_bytes(self) -> int:
        """Size of all slots that there are, in bytes."""
        return (len(self._free) + len(self._taken)) * self._num_bytes

    def has(self, tensor: Tensor) -> bool:
        """The tensor is in one of the slots."""
        mine = {slot.untyped_storage().data_ptr() for slot in (*self._free, *self._taken.values())}
        return tensor.untyped_storage().data_ptr() in mine

    def reserve(self, num_bytes: int) -> None:
        """Let slots hold a bucket's state of so many bytes."""
        self._num_bytes = max(self._num_bytes, num_bytes)

    def allocate(self, count: int) -> None:
        """Allocate so many slots, which are kept from now on; every bucket has reserved."""
        self._count = count
        for slot in [self.take() for _ in range(count)]:
            self.give(slot)

    def take(self) -> Tensor:
        """A slot: memory from a page on, uint8, shape (bytes,). Between steps there may be more of
        them than are kept."""
        while self._free:
            slot = self._free.popleft()
            if len(slot) >= self._num_bytes:
                self._taken[id(slot)] = slot
                return slot
        arena = MemoryArena(self._num_bytes, self._device, pinned=self._pinned)
        slot = arena.bytes_of(Stretch(0, self._num_bytes))
        wait_for(moment_of([slot]))  # whoever uses it does so on other queues
        self._taken[id(slot)] = slot
        return slot

    def give(self, slot: Tensor) -> None:
        """Give a slot back; whoever used its memory is done with it."""
        del self._taken[id(slot)]
        if len(self._free) < self._count:
            self._free.append(slot)
