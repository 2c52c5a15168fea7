"""Losses on their way from the device to the host."""

# A loss is copied behind its forward, and read when the loop has seen the forward end. To read it
# sooner would stop the host until the device has caught up, once a microbatch.

from collections.abc import Callable, Sequence

from torch import Tensor

from axrt.model.loss import check_finite
from axrt.runtime.losses import Losses, check_all_weighted_or_none


class LossReader:
    """Losses of microbatches, read on the host when the device is done with them.

    Args:
        may_overflow: True where a loss that is no finite number skips a step, and is no error.
    """

    def __init__(self, may_overflow: bool = False) -> None:
        self._may_overflow = may_overflow
        self._on_device: dict[int, tuple[Tensor, Tensor | float | None]] = {}
        self._read: list[tuple[int, float, float | None]] = []

    def start(self, number: int, loss: Tensor, weight: Tensor | float | None) -> None:
        """Copy a microbatch's loss to the host, behind the work that runs on the device.

        Args:
            loss: tensor with one element, as the loss function returned it.
            weight: weight of the loss; None where the loss is a mean.
        """
        on_host = weight.to("cpu", non_blocking=True) if isinstance(weight, Tensor) else weight
        self._on_device[number] = loss.to("cpu", non_blocking=True), on_host

    def read(self, number: int, where: Callable[[], str]) -> None:
        """Read a microbatch's loss; the device has finished its forward.

        Args:
            where: function that gives step, stage and microbatch, for the error.
        Raises:
            NonFiniteLossError: the loss, where it may not overflow, or its weight is no finite
                number.
        """
        on_device, weight_there = self._on_device.pop(number)
        loss, weight = float(on_device), None if weight_there is None else float(weight_there)
        if not self._may_overflow:
            check_finite(loss, where)
        if weight is not None:
            check_finite(weight, where, what="weight of the loss")
        self._read.append((number, loss, weight))

    def take(self, numbered: bool = False) -> Losses:
        """All losses that were read, in the order in which they were; they are let go.

        Args:
            numbered: True to say which microbatches they are of.
        """
        read, self._read = self._read, []
        return _together(read, numbered)


def _together(read: Sequence[tuple[int, float, float | None]], numbered: bool) -> Losses:
    weights = [weight for *_, weight in read if weight is not None]
    check_all_weighted_or_none(len(weights), len(read))
    numbers = [number for number, *_ in read] if numbered else None
    return Losses([loss for _, loss, _ in read], weights or None, numbers)
