"""Tiers that hold what leaves the device: the host's memory, and a disk."""

# A tier gives stretches of its memory and moves bytes between them and memory of the device. Where
# it has a budget, what does not fit is refused when it is cut.
#
# A tier is where bytes lie: a device, the host, a disk. A bucket cuts stretches of a tier when it
# is built (`Cut` keeps the budget), and nothing is allocated after the second step. A disk's tier
# is one file a rank, which never has a name, so nothing is left of a process that was killed. It
# grows with each bucket that is built, so a full disk is told before anything is trained. Bytes go
# past the page cache where the file system allows that. What comes back is checked by an XXH3, and
# the file's size and blocks are looked at before each read: a file that somebody has shortened
# would give zeros. Every fault of a disk ends in a `ScratchError`; what is slower than it could be
# is a note.

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from .arena import PAGE_BYTES, Cut, Stretch
from .memory import MemoryArena
from .scratch_file import ScratchFile

_MADE_UP_S = 5e-3  # most that passes between two copies on end, about


class Tier(Protocol):
    """The contract of a tier. Stretches that are moved at the same time must not meet."""

    @property
    def notes(self) -> Sequence[str]:
        """What a person should know, in whole sentences."""
        ...

    @property
    def is_disk(self) -> bool:
        """The tier is no memory."""
        ...

    @property
    def num_bytes(self) -> int:
        """Size of all stretches, in bytes."""
        ...

    def cut(self, num_bytes: int, purpose: str) -> Stretch:
        """A new stretch of at least so many bytes.

        Raises:
            BudgetError: the tier's budget does not hold it.
            DiskError: the disk has no room.
        """
        ...

    def read(self, stretch: Stretch, into: Tensor) -> None:
        """Bring back what was written to a stretch last.

        Args:
            stretch: one that was written to, as a whole.
            into: memory on the device, uint8: from a page on for as many bytes, or any memory for
                the first ones, which takes a copy more from a disk.
        """
        ...

    def write(self, stretch: Stretch, of: Tensor) -> None:
        """Put bytes there; they may change again when the copy has ended.

        Args:
            stretch: where they go.
            of: as many bytes on the device, uint8, from a page on.
        """
        ...

    def close(self) -> None:
        """Give all memory back."""
        ...


class HostTier:
    """The host's memory, pinned where the device is an accelerator.

    Args:
        device: device that bytes come from.
        budget_bytes: most that may be used.
        near: processors that first touch the memory; empty: any.
    """

    is_disk = False

    def __init__(
        self, device: torch.device, budget_bytes: float = math.inf, near: Sequence[int] = ()
    ) -> None:
        self._cut = Cut("host's memory (memory.scratch_gb)", budget_bytes)
        self._pinned, self._near = device.type != "cpu", near
        self._arenas: dict[Stretch, MemoryArena] = {}
        self.notes: list[str] = []

    @property
    def num_bytes(self) -> int:
        return self._cut.num_bytes

    def cut(self, num_bytes: int, purpose: str) -> Stretch:
        stretch = self._cut.stretch(num_bytes, purpose)
        arena = MemoryArena(
            stretch.num_bytes, torch.device("cpu"), pinned=self._pinned, near=self._near
        )
        self._arenas[stretch] = arena
        self.notes += arena.notes if not self.notes else ()  # once is enough
        return stretch

    def read(self, stretch: Stretch, into: Tensor) -> None:
        into.copy_(self.bytes_of(stretch)[: len(into)], non_blocking=True)

    def write(self, stretch: Stretch, of: Tensor) -> None:
        self.bytes_of(stretch).copy_(of, non_blocking=True)

    def close(self) -> None:
        self._arenas.clear()

    def has(self, tensor: Tensor) -> bool:
        """The tensor is in some stretch."""
        memory = tensor.untyped_storage().data_ptr()
        whole = (arena.bytes_of(Stretch(0, of.num_bytes)) for of, arena in self._arenas.items())
        return any(one.untyped_storage().data_ptr() == memory for one in whole)

    def bytes_of(self, stretch: Stretch) -> Tensor:
        """The memory of a stretch itself, uint8."""
        return self._arenas[stretch].bytes_of(Stretch(0, stretch.num_bytes))


class DiskTier:
    """A file on a disk that grows with each cut, see `ScratchFile`.

    Memory of an accelerator goes through pinned memory of the host, one piece a direction.

    Args:
        budget_bytes: most that may be used.
    Raises:
        DiskError: there is no such directory, or it cannot be written to.
    """

    is_disk = True

    def __init__(self, directory: Path, budget_bytes: float = math.inf) -> None:
        self._cut = Cut("scratch disk (memory.scratch_gb)", budget_bytes)
        self._file = ScratchFile(directory, 0)
        self.notes = self._file.notes
        self._between: dict[str, MemoryArena] = {}

    @property
    def num_bytes(self) -> int:
        return self._cut.num_bytes

    def cut(self, num_bytes: int, purpose: str) -> Stretch:
        stretch = self._cut.stretch(num_bytes, purpose)
        self._file.extend(stretch.num_bytes)
        return stretch

    def read(self, stretch: Stretch, into: Tensor) -> None:
        is_on_host = into.device.type == "cpu"
        if is_on_host and len(into) == stretch.num_bytes and not into.data_ptr() % PAGE_BYTES:
            self._file.read(stretch, into)
            return
        between = self._memory_between("in", stretch.num_bytes, pinned=not is_on_host)
        self._file.read(stretch, between)
        into.copy_(between[: len(into)])

    def write(self, stretch: Stretch, of: Tensor) -> None:
        if of.device.type == "cpu":
            self._file.write(stretch, of)
            return
        between = self._memory_between("out", stretch.num_bytes)
        between.copy_(of)
        self._file.write(stretch, between)

    def close(self) -> None:
        self._file.close()
        self._between.clear()

    def _memory_between(self, direction: str, num_bytes: int, pinned: bool = True) -> Tensor:
        arena = self._between.get(direction)
        if arena is None or arena.num_bytes < num_bytes:
            arena = MemoryArena(num_bytes, torch.device("cpu"), pinned=pinned)
            self._between[direction] = arena
        return arena.bytes_of(Stretch(0, num_bytes))


class PacedTier:
    """A tier whose copies take at least as long as a bandwidth allows, in each direction.

    A copy that begins a moment after the one before has ended may make up for that moment, so that
    copies on end have the bandwidth and not a little less.

    Args:
        tier: tier that holds the bytes.
    """

    def __init__(self, tier: Tier, bytes_per_s: float) -> None:
        self._tier, self._bytes_per_s = tier, bytes_per_s
        self._read_until_s = self._written_until_s = 0.0

    @property
    def is_disk(self) -> bool:
        return self._tier.is_disk

    @property
    def notes(self) -> Sequence[str]:
        return self._tier.notes

    @property
    def num_bytes(self) -> int:
        return self._tier.num_bytes

    def cut(self, num_bytes: int, purpose: str) -> Stretch:
        return self._tier.cut(num_bytes, purpose)

    def read(self, stretch: Stretch, into: Tensor) -> None:
        until_s = self._read_until_s = self._end_s(self._read_until_s, stretch)
        self._tier.read(stretch, into)
        _wait_until(until_s, into)

    def write(self, stretch: Stretch, of: Tensor) -> None:
        until_s = self._written_until_s = self._end_s(self._written_until_s, stretch)
        self._tier.write(stretch, of)
        _wait_until(until_s, of)

    def close(self) -> None:
        self._tier.close()

    def _end_s(self, before_s: float, stretch: Stretch) -> float:
        """When a copy that begins now may end, after one that might end at `before_s`."""
        now_s = time.perf_counter()
        begins_s = before_s if now_s - before_s < _MADE_UP_S else now_s
        return begins_s + stretch.num_bytes / self._bytes_per_s


def _wait_until(until_s: float, memory: Tensor) -> None:
    if memory.device.type != "cpu":  # the copy was only launched
        torch.accelerator.current_stream(memory.device).synchronize()
    time.sleep(max(0.0, until_s - time.perf_counter()))
