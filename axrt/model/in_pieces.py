"""A layer whose forward comes in pieces: between two of them a rank may run tasks of other
microbatches."""

from collections.abc import Iterable
from typing import Any

from torch import nn


class InPieces(nn.Module):
    """Modules that run one after the other, as one layer.

    Args:
        pieces: the modules, at least one; each takes what the one before has returned. A value
            between two of them never leaves the rank.
    """

    def __init__(self, pieces: Iterable[nn.Module]) -> None:
        super().__init__()
        self.pieces = nn.ModuleList(pieces)

    def forward(self, value: Any) -> Any:
        for piece in self.pieces:
            value = piece(value)
        return value
