"""Parameters of one type in flat memory, and their masters in other flat memory of one layout."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from .flat import FlatBuffer, Layout
from .shards import Cut, Piece


@dataclass(slots=True)
class MasterGroup:
    """Parameters of one type, with their masters: each list in flat memory."""

    parameters: list[nn.Parameter]  # the module's
    masters: list[nn.Parameter]  # their masters, or those of their pieces
    narrow: FlatBuffer  # memory of the module's
    # the weights that masters are of, in the type of the module's: a part of `narrow`, or
    # memory of its own; None while they are in scratch
    mine: Tensor | None
    layout: Layout  # where each master begins in its memory
    wide: FlatBuffer | None  # memory of the masters; None while they are elsewhere
    before: torch.dtype  # type that the module's had
    # what the module's are while whole weights are let go; () where they never are
    away: list[Tensor]
    cut: Cut | None  # shards of the memory; None: there is one
    # fingerprint of the weights that have come from scratch for a residency
    brought: Tensor | None = None

    @property
    def is_narrow(self) -> bool:
        """Layers compute with another type than that of the masters."""
        return self.narrow.dtype != self.layout.dtype


def master_group(
    parameters: list[nn.Parameter],
    to: torch.dtype | None,
    device: torch.device,
    of_masters: torch.device,
    cut: Cut | None,
    pieces: Sequence[Piece],
    narrowest: torch.dtype | None,
) -> MasterGroup:
    """Put parameters of one type into flat memory, with masters of their pieces.

    Args:
        to: narrow type that layers compute with; None: the parameters' own.
        device: device of the parameters.
        of_masters: device of the masters.
        cut: shards of that memory; None: there is one.
        pieces: pieces that have masters here.
        narrowest: narrowest type of any copy's parameters, by which all cut alike.
    """
    before = parameters[0].dtype
    narrowest, wide_type = (narrowest, before) if to is None else (to, torch.float32)
    narrow = FlatBuffer(parameters, device, to, narrowest)
    of_pieces = [piece.of(_dense(parameters[piece.place])) for piece in pieces]
    wide = FlatBuffer(of_pieces, of_masters, wide_type, narrowest)
    layout = Layout(of_pieces, wide_type, narrowest)
    masters = []
    for piece, its, view in zip(pieces, of_pieces, wide.views, strict=True):
        view.copy_(its)
        masters.append(nn.Parameter(view))
        marks = parameters[piece.place].__dict__  # for the user's factory
        masters[-1].__dict__.update(marks)
    for parameter, copy in zip(parameters, narrow.views, strict=True):
        copy.copy_(parameter.detach())
        parameter.grad = None
        parameter.data = copy
    mine = shards_of(narrow, cut)[cut.mine if cut else 0]
    return MasterGroup(parameters, masters, narrow, mine, layout, wide, before, [], cut)


def shards_of(memory: FlatBuffer, cut: Cut | None) -> list[Tensor]:
    """The shards of a group's flat memory; all of it where there is one."""
    if cut is None:
        return [memory.flat]
    bounds = cut.bounds(memory.layout)
    return [memory.flat[first:end] for first, end in pairwise(bounds)]


def _dense(parameter: nn.Parameter) -> Tensor:
    """The values of a parameter without gaps between them."""
    value = parameter.detach()
    return value if value.is_contiguous() else value.clone()
