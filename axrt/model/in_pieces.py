"""A layer whose forward comes in pieces: between two of them a rank may run tasks of other
microbatches."""

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

from .joints import alone, check_no_joint


class InPieces(nn.Module):
    """Modules that run one after the other, as one layer.

    Args:
        pieces: the modules, at least one; each takes what the one before has returned. What stands
            in `Sum` or `Gathered` there is exchanged with the other members of a team
            (`joints.py`); nothing else between two of them leaves the rank. Where the layer has
            hooks or a forward of its own, no task runs between two pieces.
    """

    def __init__(self, pieces: Iterable[nn.Module]) -> None:
        super().__init__()
        self.pieces = nn.ModuleList(pieces)

    def forward(self, value: Any) -> Any:
        for piece in self.pieces:
            value = piece(alone(value))
        check_no_joint(value)
        return value

    @property
    def is_only_its_pieces(self) -> bool:
        """True if to run the pieces one by one is to run the layer."""
        own_hooks = (
            self._forward_pre_hooks,
            self._forward_hooks,
            self._backward_pre_hooks,
            self._backward_hooks,
        )
        return (
            type(self).forward is InPieces.forward
            and "forward" not in vars(self)  # set on the object, as tools that wrap layers do
            and not any(own_hooks)
            and not torch_module._has_any_global_hook()  # type: ignore[no-untyped-call]
        )
