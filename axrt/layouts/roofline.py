"""How long torch's operations would take on a device that is only described: a roofline."""

# Williams et al. 2009: an operation takes as long as the slower of two things, its arithmetic at
# the rate that products reach, and the bytes that it reads and writes at the bandwidth of memory.
# Each operation is counted by itself, as torch runs it when nothing is compiled. It finds nothing
# in a cache, and attention is one operation, which keeps no table of all pairs of tokens.

from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from axrt.model.operation_counter import OperationCounter
from axrt.scheduler.cluster.cluster import Device

_WRITE_NOTHING = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")


class Roofline(OperationCounter):  # type: ignore[no-untyped-call]
    """Counts what operations would take while it is entered, on tensors of whatever kind.

    Args:
        device: device that they are to run on.
    Attributes:
        seconds: time that they would take there, one after the other.
        num_bytes: bytes that they read and write.
    """

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device
        self.seconds, self.num_bytes = 0.0, 0

    def note(self, func: OpOverload, args: Any, kwargs: dict[str, Any], out: Any) -> int:
        operations = super().note(func, args, kwargs, out)
        if not _moves_nothing(func):
            given = _tensors_in((args, kwargs))
            all_of_it = {id(one): one for one in (*given, *_tensors_in(out))}
            num_bytes = sum(map(_bytes_of, all_of_it.values()))
            self.num_bytes += num_bytes
            moved_s = num_bytes / self._device.bandwidth
            self.seconds += max(moved_s, self._of_products(operations, given))
        return operations

    def _of_products(self, operations: int, given: list[Tensor]) -> float:
        if not operations:
            return 0.0
        kind = next(one.dtype for one in given if one.is_floating_point())
        return operations / self._device.rate(str(kind).removeprefix("torch."))


def _moves_nothing(func: OpOverload) -> bool:
    """It looks at tensors, makes views, or only takes memory."""
    returns = func._schema.returns
    views = returns and all(one.alias_info and not one.alias_info.is_write for one in returns)
    return bool(views) or func.namespace == "prim" or func._opname in _WRITE_NOTHING


def _tensors_in(values: Any) -> list[Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, Tensor)]


def _bytes_of(tensor: Tensor) -> int:
    """What is read of a tensor, or written: one that is expanded has fewer bytes than elements."""
    return min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())
