"""Memory that waits for what comes with certain messages, so that nothing is copied when it has
come."""

from collections.abc import Sequence

import torch
from torch import Tensor

from axrt.note import News

from .wire import Layout


class Landings:
    """What is expected on a rank, by generation and message."""

    def __init__(self) -> None:
        self._rooms: dict[tuple[int, News], tuple[Tensor, ...]] = {}

    def expect(self, generation: int, message: News, rooms: Sequence[Tensor]) -> None:
        """The tensors of a message go into these, one each, in order; those of older generations
        are not expected any more."""
        for key in [key for key in self._rooms if key[0] < generation]:
            del self._rooms[key]
        self._rooms[generation, message] = tuple(rooms)

    def take(self, generation: int, message: News) -> tuple[Tensor, ...]:
        """The memory for a message that has come; () where none was given."""
        return self._rooms.pop((generation, message), ()) if self._rooms else ()


def fits(room: Tensor, layout: Layout) -> bool:
    """MPI may write there what travels, and it is then as it was sent."""
    spec = layout.spec
    return (
        room.device == torch.device("cpu")
        and (room.dtype, tuple(room.shape), room.stride()) == (spec.dtype, spec.shape, spec.strides)
        and room.is_contiguous()
        and not spec.requires_grad
    )
