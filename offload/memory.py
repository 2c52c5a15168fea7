"""An arena in the memory of a device or of the host."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .arena import PAGE_BYTES, Stretch
from .numa import on_cpus


def aligned(num_bytes: int, device: torch.device) -> Tensor:
    """New memory that begins at a page, uint8, shape (num_bytes,)."""
    memory = torch.empty(num_bytes + PAGE_BYTES, dtype=torch.uint8, device=device)
    start = -memory.data_ptr() % PAGE_BYTES
    return memory[start : start + num_bytes]


class MemoryArena:
    """One piece of memory that begins at a page.

    Args:
        num_bytes: size, in bytes.
        pinned: True for memory of the host that the system never moves, from which an accelerator
            copies by itself. Where the system refuses that, the memory is ordinary and a note says
            so.
        near: processors that first touch the memory, so that it lies with them (NUMA); empty: any.
    Attributes:
        num_bytes: size, in bytes.
        notes: what a person should know, in whole sentences.
    """

    def __init__(
        self,
        num_bytes: int,
        device: torch.device,
        pinned: bool = False,
        near: Sequence[int] = (),
    ) -> None:
        self.num_bytes = num_bytes
        self.notes: list[str] = []
        with on_cpus(near):
            memory = self._allocated(num_bytes + PAGE_BYTES, device, pinned)
            start = -memory.data_ptr() % PAGE_BYTES
            self._bytes = memory[start : start + num_bytes].zero_()  # touched now, and so there

    def bytes_of(self, stretch: Stretch) -> Tensor:
        """The bytes of a stretch, uint8, shape (stretch.num_bytes,)."""
        return self._bytes[stretch.start : stretch.start + stretch.num_bytes]

    def tensor(self, stretch: Stretch, dtype: torch.dtype, elements: int) -> Tensor:
        """The first elements of a stretch, of any type, shape (elements,)."""
        return self.bytes_of(stretch)[: elements * dtype.itemsize].view(dtype)

    def _allocated(self, num_bytes: int, device: torch.device, pinned: bool) -> Tensor:
        if pinned:
            try:
                return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                self.notes.append(
                    f"{num_bytes} bytes of host memory could not be pinned "
                    f"({str(error).splitlines()[0]}), so copies to and from the device wait for "
                    "the host. A higher limit of locked memory (ulimit -l) may help."
                )
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
