"""The bytes that a rank sends through torch.distributed.

Every collective of Python and of C++ comes to torch's dispatcher as an operator of `c10d`. There
its size is read, and what a ring of the group's ranks sends for it is added up. That is the least
for large tensors; the library may send otherwise. Where ranks send differently, as in a broadcast,
it is the mean over them.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class _Sends(NamedTuple):
    """What a collective of n ranks sends.

    Args:
        place: argument with the tensors that count, those of all ranks or of the result.
        rounds: how often a rank sends (n - 1) / n of them.
    """

    place: int
    rounds: float


_COLLECTIVES = {
    "allreduce_": _Sends(0, 2),
    "allreduce_coalesced_": _Sends(0, 2),
    "broadcast_": _Sends(0, 1),
    "reduce_": _Sends(0, 1),
    "allgather_": _Sends(0, 1),
    "_allgather_base_": _Sends(0, 1),
    "allgather_coalesced_": _Sends(0, 1),
    "allgather_into_tensor_coalesced_": _Sends(0, 1),
    "reduce_scatter_": _Sends(1, 1),
    "_reduce_scatter_base_": _Sends(1, 1),
    "reduce_scatter_tensor_coalesced_": _Sends(1, 1),
    "alltoall_": _Sends(1, 1),
    "alltoall_base_": _Sends(1, 1),
}
_SENDS_NOTHING = ("barrier", "monitored_barrier_", "recv_", "recv_any_source_")


class RingTraffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts within its context.

    Attributes:
        num_bytes: bytes so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d":
            self.num_bytes += _sent(func.overloadpacket.__name__, args)
        return func(*args, **(kwargs or {}))


def _sent(name: str, args: tuple[Any, ...]) -> float:
    if name in _SENDS_NOTHING:
        return 0.0
    if name == "send":
        return sum(tensor.nbytes for tensor in _tensors(args[0]))
    if name not in _COLLECTIVES:
        raise ValueError(f"c10d::{name} is a collective whose bytes traffic.py does not know")
    place, rounds = _COLLECTIVES[name]
    ranks = _group_in(args).size()
    return rounds * (ranks - 1) / ranks * sum(tensor.nbytes for tensor in _tensors(args[place]))


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for one in value for tensor in _tensors(one)]


def _group_in(args: tuple[Any, ...]) -> dist.ProcessGroup:
    boxed = (one for one in args if isinstance(one, torch.ScriptObject))
    kinds = (one for one in boxed if "ProcessGroup" in str(one._type()))
    return dist.ProcessGroup.unbox(next(kinds))
