"""How long torch's operations would take on a device that is only described: a roofline."""

# Williams et al. 2009: an operation takes as long as the slower of two things, its arithmetic at
# the rate that products reach, and the bytes that it reads and writes at the bandwidth of memory.
# Each operation is counted by itself, as torch runs it when nothing is compiled. It finds nothing
# in a cache, and attention is one operation, which keeps no table of all pairs of tokens.

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from axrt.model.operation_counter import OperationCounter
from axrt.scheduler.cluster.cluster import Device

_WRITE_NOTHING = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")


_WRITE_ALONE = ("copy_", "fill_", "zero_")


class Counted(NamedTuple):
    """One of torch's operations."""

    name: str  # what torch calls it
    kind: str  # type that a product computes in, such as "bfloat16"; "" where it is none
    operations: int  # its additions and multiplications
    num_bytes: int  # bytes that it reads and writes


class RooflineCounter(OperationCounter):  # type: ignore[no-untyped-call]
    """Counts what operations do while it is entered, on tensors of whatever kind.

    Attributes:
        counted: the operations, in their order, but for those that move and compute nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counted: list[Counted] = []

    def note(self, func: OpOverload, args: Any, kwargs: dict[str, Any], out: Any) -> int:
        operations = super().note(func, args, kwargs, out)
        if not _moves_nothing(func):
            given = _tensors_in((args, kwargs))
            moved = (*_once(_read(func, args, kwargs)), *_once(_tensors_in(out)))
            num_bytes = sum(map(_bytes_of, moved))
            kind = _kind_of(given) if operations else ""
            self.counted.append(Counted(str(func), kind, operations, num_bytes))
        return operations


def _read(func: OpOverload, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operation reads: all but those that it only writes."""
    if func._opname in _WRITE_ALONE:
        return _tensors_in(args[1:])
    written = {
        one.name
        for one in func._schema.arguments
        if one.kwarg_only and one.alias_info and one.alias_info.is_write
    }
    return _tensors_in((args, {name: of for name, of in kwargs.items() if name not in written}))


def _once(tensors: Iterable[Tensor]) -> Iterable[Tensor]:
    return {id(one): one for one in tensors}.values()


def seconds_on(device: Device, counted: Iterable[Counted]) -> float:
    """The time that operations would take on a device, one after the other.

    Raises:
        ValueError: it is not known how many a second the device does of a type.
    """
    rates = {kind: device.rate(kind) for kind in {one.kind for one in counted} if kind}
    return sum(
        max(one.num_bytes / device.bandwidth, one.operations / rates[one.kind] if one.kind else 0.0)
        for one in counted
    )


def _kind_of(given: list[Tensor]) -> str:
    kind = next(one.dtype for one in given if one.is_floating_point())
    return str(kind).removeprefix("torch.")


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
