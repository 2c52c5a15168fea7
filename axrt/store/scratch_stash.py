"""Stashes of microbatches in scratch: what autograd has saved on a stage, between a forward and a
backward that is far."""

# A stash is gathered in memory that begins at a page and copied to a stretch of scratch; it comes
# back to memory of its own, of which its tensors are views. A stage's stretches have the size of
# its first microbatch, and are cut as they are needed: no more than its policy holds at a time.
# What does not fit stays on the device, and a note says so.

import sys
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from axrt.model.saved import SavedTensors
from axrt.offload.arena import PAGE_BYTES, BudgetError, Stretch
from axrt.offload.memory import aligned
from axrt.offload.scratch_file import DiskError
from axrt.offload.tier import Tier

from .scratch import named_faults


class ScratchStash:
    """The stashes of a rank that are in scratch."""

    def __init__(self, tier: Tier, device: torch.device) -> None:
        self._tier, self._device = tier, device
        self._sizes: dict[int, int] = {}  # of a stash, by stage
        self._free: dict[int, list[Stretch]] = defaultdict(list)  # by stage
        self._down: dict[tuple[int, int], Stretch] = {}  # by stage and microbatch
        self._back: dict[tuple[int, int], Tensor] = {}
        self._gathered: Tensor | None = None
        self._told: set[str] = set()

    def take_down(self, stage: int, number: int, saved: SavedTensors) -> None:
        """Copy what a microbatch has saved to scratch, if it fits. It runs on the queue of copies
        out.

        Raises:
            ScratchError: the disk has not done what it was asked for.
        """
        stretch = self._stretch(stage, saved.measure())
        if stretch is None:
            saved.stay()
            return
        memory = self._memory(stretch.num_bytes)
        saved.copy_to(memory)
        with named_faults(f"activations of stage {stage}, microbatch {number}"):
            self._tier.write(stretch, memory)
        self._down[stage, number] = stretch

    def has_gone(self, stage: int, number: int, saved: SavedTensors) -> None:
        """Let go what a copy that has ended has carried."""
        if (stage, number) in self._down:
            saved.let_go()

    def bring_back(self, stage: int, number: int) -> None:
        """Copy what a microbatch has saved to the device. It runs on the queue of copies in.

        Raises:
            ScratchError: the disk has not done what it was asked for.
        """
        stretch = self._down.get((stage, number))
        if stretch is None:
            return
        memory = aligned(stretch.num_bytes, self._device)
        with named_faults(f"activations of stage {stage}, microbatch {number}"):
            self._tier.read(stretch, memory)
        self._back[stage, number] = memory

    def has_come(self, stage: int, number: int, saved: SavedTensors) -> None:
        """Give tensors what a copy that has ended has carried."""
        memory = self._back.pop((stage, number), None)
        if memory is not None:
            saved.take_back(memory)
            self._free[stage].append(self._down.pop((stage, number)))

    @property
    def num_bytes(self) -> int:
        """What stashes have taken of scratch so far."""
        of_stages = ((stage, len(free)) for stage, free in self._free.items())
        free_bytes = sum(count * self._sizes[stage] for stage, count in of_stages)
        return free_bytes + sum(stretch.num_bytes for stretch in self._down.values())

    @property
    def is_on_disk(self) -> bool:
        """Scratch is no memory."""
        return self._tier.is_disk

    @property
    def notes(self) -> Sequence[str]:
        """What a person should know of scratch, in whole sentences."""
        return self._tier.notes

    def close(self) -> None:
        """Give all memory back."""
        self._tier.close()

    def drop(self) -> None:
        """Forget all stashes; no copy is under way."""
        for (stage, _), stretch in self._down.items():
            self._free[stage].append(stretch)
        self._down.clear()
        self._back.clear()

    def _stretch(self, stage: int, num_bytes: int) -> Stretch | None:
        """Room in scratch for a stash; None where there is none, or nothing to copy."""
        whole = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        size = self._sizes.setdefault(stage, whole)
        if not whole:  # a stage that runs its layers again saves nothing
            return None
        if whole > size:
            self._note(
                f"A microbatch of stage {stage} saves {whole} bytes, and the first one {size}"
            )
            return None
        if self._free[stage]:
            return self._free[stage].pop()
        try:
            return self._tier.cut(size, "stashes")
        except (BudgetError, DiskError) as error:
            self._note(str(error))
            return None

    def _memory(self, num_bytes: int) -> Tensor:
        """Memory in which a stash is put together; copies out run one after the other."""
        if self._gathered is None or len(self._gathered) < num_bytes:
            self._gathered = aligned(num_bytes, self._device)
        return self._gathered[:num_bytes]

    def _note(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            print(
                f"axrt: a stash stays on the device: {text.partition('; expected')[0]}. Set "
                "memory.scratch_gb higher, or memory.offload_activations = 0",
                file=sys.stderr,
                flush=True,
            )
