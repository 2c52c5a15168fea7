"""Parameters from the pieces of all copies (ZeRO), where members of teams have cut some of them."""

# What is not cut has a piece on each copy. What is cut has one on each copy of the same member, and
# comes together in two steps: to what that member has, and to the whole.

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from axrt.model.tensor_cuts import Part, Parts

from .saved_piece import WholeParameter, wholes_of

OfPipes = Sequence[Sequence[Sequence[Any]]]  # pieces of each copy, by pipe


def wholes_of_member(
    shapes: dict[str, torch.Size], of_pipes: OfPipes, cut: Parts, member: int
) -> dict[str, WholeParameter]:
    """What a member has of each parameter, by name.

    Args:
        shapes: shape of what it has.
        cut: what the members have of each parameter that they share out.
    """
    mine = [
        [piece for piece in of if piece[0] not in cut or _is_of(member, pipe, cut[piece[0]])]
        for pipe, of in enumerate(of_pipes)
    ]
    return wholes_of(shapes, mine)


def wholes_of_teams(
    shapes: dict[str, torch.Size], of_pipes: OfPipes, cut: Parts
) -> dict[str, WholeParameter]:
    """All parameters whole, those that members have cut put together; see `wholes_of_member`."""
    found = wholes_of_member(shapes, of_pipes, cut, 0)
    for name in found.keys() & cut.keys():
        part = cut[name]
        only = [[piece for piece in of if piece[0] == name] for of in of_pipes]
        of_members = [
            of[name]
            for member in range(part.team.size)  # some are with the first one alone
            if (of := wholes_of_member(shapes, only, cut, member))
        ]
        found[name] = _together(part, of_members)
    return found


def _is_of(member: int, pipe: int, part: Part) -> bool:
    return pipe % part.team.size == member


def _together(part: Part, of_members: Sequence[WholeParameter]) -> WholeParameter:
    masters = [of.master for of in of_members if of.master is not None]
    state = of_members[0].state
    tensors = {
        key: part.whole([of.state.tensors[key] for of in of_members]) for key in state.tensors
    }
    return WholeParameter(part.whole(masters) if masters else None, replace(state, tensors=tensors))
