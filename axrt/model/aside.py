"""Tensors that a layer has made before a joint and uses behind it, such as a residual."""

# A graph ends at a joint, so that a backward has a piece for each. A layer whose forward pauses has
# variables that pass the joint aside. What a piece reads of them comes in through an inlet, as what
# comes over the joint does, and its gradient waits for the backward of the piece that made it.
#
#     piece 1   x ---- norm, columns, rows ---> joint
#     piece 2   '-> inlet -> x + sum ...        its gradient of x is a root of piece 1's backward
#
# Which tensors are older than a piece is told by autograd's sequence numbers, which grow with each
# node. They are exchanged in the arguments of torch's functions, where a mode sees them all but
# those of a user's own `autograd.Function`; that is noticed in the first microbatch (`are_apart`).

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode

from axrt.errors import ModelError

from .inlet import Inflow, Inlet
from .segment import edge_of

_VIEWS = ("T", "mT", "H", "mH", "real", "imag")  # attributes that are functions of a tensor
_IN_PLACE = ("__set__", "detach_", "set_", "resize_")  # they change it without a new version
# What is said to a tensor, and must reach the very one.
_OF_TENSORS = ("register_hook", "register_post_accumulate_grad_hook", "retain_grad")


class Root(NamedTuple):
    """Where a gradient begins that has come back aside from a joint."""

    edge: GradientEdge
    gradient: Tensor


class Aside(TorchFunctionMode):
    """Context of a piece, in which tensors of earlier pieces come in through inlets.

    Args:
        inlet: what lets them in.
    Attributes:
        since: sequence number of the first node of the piece.
    """

    def __init__(self, inlet: Inlet) -> None:
        super().__init__()
        self._inlet = inlet
        self.since = _next_number()
        self._entered: dict[int, tuple[Tensor, Tensor]] = {}  # by identity: the tensor, from inside
        self._passed: list[tuple[GradientEdge, Inflow]] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch with the tensors from inside.

        Raises:
            ModelError: it changes one in place, which the layer would not see.
        """
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(func.__self__, "__name__", "")  # type: ignore[attr-defined]
            is_of_tensor = name not in _VIEWS
        else:
            is_of_tensor = name in _OF_TENSORS
        if is_of_tensor or not torch.is_grad_enabled():
            return func(*args, **(kwargs or {}))
        inside = [self.through(one) for one in args]
        named = {key: self.through(one) for key, one in (kwargs or {}).items()}
        versions = [(tensor, tensor._version) for tensor, _ in self._entered.values()]
        made = func(*inside, **named)
        is_other = name in _IN_PLACE and inside[0] is not args[0]
        if is_other or any(tensor._version != version for tensor, version in versions):
            raise ModelError(
                f"{name} changes a tensor in place that the layer has made before members "
                "of its team exchanged slices; expected a function that makes a new one"
            )
        return made

    def through(self, value: Any) -> Any:
        """A value with the tensors from inside."""
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, tuple | list):
            inside = [self.through(one) for one in value]
            return tuple(inside) if isinstance(value, tuple) else inside
        return value

    def end(self) -> "Aside":
        """Let the graph of the piece go, which has ended."""
        self._entered.clear()
        return self

    def roots(self) -> list[Root]:
        """Where gradients begin in earlier pieces, once the backward of this one has run."""
        return [
            Root(edge, gradient)
            for edge, inflow in self._passed
            for gradient in inflow.gradients
            if gradient is not None
        ]

    def _tensor(self, tensor: Tensor) -> Tensor:
        made_by = tensor.grad_fn if tensor.requires_grad else None
        if made_by is None or made_by._sequence_nr() >= self.since:
            return tensor
        if id(tensor) not in self._entered:
            inflow = Inflow()
            with torch._C.DisableTorchFunction():
                inside = self._inlet.through(tensor, inflow)
            self._entered[id(tensor)] = tensor, inside
            self._passed.append((edge_of(tensor), inflow))
        return self._entered[id(tensor)][1]


def _next_number() -> int:
    """The number that autograd gives the next node of this thread, or the one before."""
    with torch.enable_grad():
        node = torch.empty(0, requires_grad=True).view(0).grad_fn
    assert node is not None
    return int(node._sequence_nr())
