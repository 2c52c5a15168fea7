"""Layers that come in pieces, and what the members of a team run of a layer."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

from axrt.errors import ConfigError

from .joints import alone, check_no_joint


class Jointed(nn.Module):
    """A layer that says what members of a team run of it. One rank alone calls it as any layer."""

    @property
    def team_pieces(self) -> Sequence[Callable[[Any], Any]]:
        """What a member runs one after the other. What stands in `Sum` or `Gathered` in the value
        of one is exchanged with the other members before the next one has it (`joints.py`)."""
        raise NotImplementedError

    @property
    def is_only_its_pieces(self) -> bool:
        """True if to run the pieces one by one is to run the layer."""
        own_hooks = (
            self._forward_pre_hooks,
            self._forward_hooks,
            self._backward_pre_hooks,
            self._backward_hooks,
        )
        kinds = type(self).__mro__
        last = next(kind for kind in kinds if {"forward", "team_pieces"} & vars(kind).keys())
        return (
            "team_pieces" in vars(last)  # else a subclass has a forward that they are not
            and "forward" not in vars(self)  # set on the object, as tools that wrap layers do
            and not any(own_hooks)
            and not torch_module._has_any_global_hook()  # type: ignore[no-untyped-call]
        )


class InPieces(Jointed):
    """Modules that run one after the other, as one layer; between two of them a rank may run tasks
    of other microbatches.

    Args:
        pieces: the modules, at least one; each takes what the one before has returned. What stands
            in `Sum` or `Gathered` there is exchanged with the other members of a team; nothing else
            between two of them leaves the rank. Where the layer has hooks or a forward of its own,
            no task runs between two pieces.
    Raises:
        ConfigError: there are no modules.
    """

    def __init__(self, pieces: Iterable[nn.Module]) -> None:
        super().__init__()
        self.pieces = nn.ModuleList(pieces)
        if not self.pieces:
            raise ConfigError("InPieces of no modules; expected at least one")

    @property
    def team_pieces(self) -> Sequence[Callable[[Any], Any]]:
        return list(self.pieces)

    def forward(self, value: Any) -> Any:
        for piece in self.pieces:
            value = piece(alone(value))
        check_no_joint(value)
        return value
