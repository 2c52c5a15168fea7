"""Losses on their way from the device to the host."""

from collections.abc import Callable, Sequence

from torch import Tensor

from axrt.losses import Losses, check_all_weighted_or_none
from axrt.model.stage import check_finite


class LossReader:
    """Losses of microbatches, read on the host when the device is done with them.

    Args:
        may_overflow: True where a loss that is no finite number skips a step, and is no error.
    """

    def __init__(self, may_overflow: bool = False) -> None:
        self._may_overflow = may_overflow
        self._on_device: dict[int, tuple[Tensor, Tensor | float | None]] = {}
        self._read: list[tuple[float, float | None]] = []

    def __len__(self) -> int:
        """Number of losses that were read and not taken."""
        return len(self._read)

    def start(self, number: int, loss: Tensor, weight: Tensor | float | None) -> None:
        """Copy a microbatch's loss to the host, behind the work that runs on the device.

        Args:
            number: running number of the microbatch.
            loss: tensor with one element, as the loss function returned it.
            weight: weight of the loss; None where the loss is a mean.
        """
        on_host = weight.to("cpu", non_blocking=True) if isinstance(weight, Tensor) else weight
        self._on_device[number] = loss.to("cpu", non_blocking=True), on_host

    def read(self, number: int, where: Callable[[], str]) -> None:
        """Read a microbatch's loss; the device has finished its forward.

        Args:
            number: running number of the microbatch.
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
        self._read.append((loss, weight))

    def take(self) -> Losses:
        """All losses that were read, in the order of microbatches; they are let go."""
        read, self._read = self._read, []
        return _together(read)


def _together(pairs: Sequence[tuple[float, float | None]]) -> Losses:
    weights = [weight for _, weight in pairs if weight is not None]
    check_all_weighted_or_none(len(weights), len(pairs))
    return Losses([loss for loss, _ in pairs], weights or None)
