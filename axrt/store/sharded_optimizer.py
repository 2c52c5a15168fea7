"""An optimizer that steps the pieces of one shard (ZeRO), made by a factory that saw whole
parameters."""

import torch
from torch import Tensor, nn

from .masters import Masters
from .shards import Piece


def give_pieces(optimizer: torch.optim.Optimizer, masters: Masters) -> None:
    """Let an optimizer step pieces in place of parameters: its groups keep their values, and state
    that it has from its start is cut.
    """
    pieces: dict[nn.Parameter, list[tuple[Piece, nn.Parameter]]] = {}
    for piece, stepped in zip(masters.pieces, masters.parameters, strict=True):
        pieces.setdefault(masters.shown[piece.place], []).append((piece, stepped))
    for group in optimizer.param_groups:
        listed = group["params"]
        group["params"] = [stepped for whole in listed for _, stepped in pieces.get(whole, ())]
        if "param_names" in group:  # of an optimizer that was made from pairs
            names = zip(group["param_names"], listed, strict=True)
            group["param_names"] = [name for name, whole in names for _ in pieces.get(whole, ())]
    begun = {
        whole: optimizer.state.pop(whole) for whole in masters.shown if whole in optimizer.state
    }
    for whole, of_one in begun.items():
        for piece, stepped in pieces.get(whole, ()):
            optimizer.state[stepped] = {
                key: _cut(value, piece, whole) for key, value in of_one.items()
            }


def _cut(value: object, piece: Piece, whole: nn.Parameter) -> object:
    if isinstance(value, Tensor) and value.dim() and value.shape == whole.shape:
        return piece.of(value).clone()
    return value
