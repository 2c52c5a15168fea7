"""One reader a replica: pipe rank 0 draws microbatches when the brain wants one, and says so to the stages that need them."""

from collections.abc import Iterable
from typing import Any

import torch

from axrt.errors import DataError
from axrt.model.seeds import BorrowedGenerator
from axrt.payload import flatten, unflatten
from axrt.scheduler.message import Meaning, Message
from axrt.scheduler.placement import Placement

_EXHAUSTED = object()


class BatchReader:
    """Draws from an iterable of (inputs, targets).

    Args:
        batches: the user's; only the rank that holds stage 0 touches it.
        placement: says where inputs and targets go.
        device: where inputs go.
        generator: given back to the user while the iterator runs.
    """

    def __init__(self, batches: Iterable[Any] | None, placement: Placement, device: torch.device, generator: BorrowedGenerator) -> None:
        self._batches = batches
        self._iterator: Any = None
        self._placement = placement
        self._device = device
        self._generator = generator

    def __call__(self, number: int) -> list[tuple[Message, Any]]:
        """Microbatch `number` as messages with their payloads, or the news, for every rank, that there is none."""
        with self._generator.returned():
            item = self._draw()
        if item is _EXHAUSTED:
            ranks = range(self._placement.ranks)
            return [(Message(Meaning.END, self._placement.stages_of(rank)[0], number), None) for rank in ranks]
        if not isinstance(item, tuple | list) or len(item) != 2:
            size = f" of {len(item)}" if isinstance(item, tuple | list) else ""
            raise DataError(f"microbatch {number} is a {type(item).__name__}{size}; expected a pair (inputs, targets)")
        inputs, target = item
        last = self._placement.stages - 1
        return [(Message(Meaning.ACTIVATION, 0, number), self._here(inputs)), (Message(Meaning.TARGET, last, number), self._here(target))]

    def _draw(self) -> Any:
        if self._iterator is None:
            if self._batches is None:
                raise DataError("batches is None on the rank that reads; expected an iterable of (inputs, targets)")
            self._iterator = iter(self._batches)
        return next(self._iterator, _EXHAUSTED)

    def _here(self, payload: Any) -> Any:
        skeleton, tensors = flatten(payload)
        return unflatten(skeleton, [tensor.to(self._device, non_blocking=True) for tensor in tensors])
