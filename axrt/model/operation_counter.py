"""Counts additions and multiplications of products as torch runs them."""

# torch's own counter follows modules by hooks, and layers of a team take none. So its formulas are
# asked here without it. They know the kernels of accelerators: what a CPU has for attention in
# their place takes the same tensors in the same order.

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten
_AS = {
    _aten._scaled_dot_product_flash_attention_for_cpu: (_aten._scaled_dot_product_flash_attention),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        _aten._scaled_dot_product_flash_attention_backward
    ),
}


class OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while it is entered, on tensors of whatever kind.

    Attributes:
        operations: additions and multiplications of products; attention as if each token saw all.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(func, OpOverload):
            self.note(func, args, kwargs or {}, out)
        return out

    def note(self, func: OpOverload, args: Any, kwargs: dict[str, Any], out: Any) -> int:
        """Count one operation of torch.

        Returns:
            Its additions and multiplications; 0 where it is no product.
        """
        packet = func._overloadpacket
        count: Callable[..., int] | None = flop_registry.get(_AS.get(packet, packet))
        found = int(count(*args, **kwargs, out_val=out)) if count else 0
        self.operations += found
        return found
