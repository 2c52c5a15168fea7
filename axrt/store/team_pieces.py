"""Parameters from the pieces of all copies (ZeRO), where members of teams have cut some of them."""

# What is not cut has a piece on each copy. What is cut has one on each copy of the same member, and
# comes together in two steps: to what that member has, and to the whole.

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from axrt.model.tensor_cuts import Part, Parts

from .saved_piece import WholeParameter, wholes_of

Shapes = Mapping[str, torch.Size]  # by name of the parameter
OfCopies = Sequence[Sequence[Sequence[Any]]]  # pieces of each copy


def wholes_of_member(
    shapes: Shapes, of_members: Sequence[OfCopies], cut: Parts, member: int
) -> dict[str, WholeParameter]:
    """What a member has of each parameter, by name.

    Args:
        shapes: shape of what it has.
        of_members: pieces of the copies of each member.
        cut: what the members have of each parameter that they share out.
    """
    mine = [
        [piece for piece in of if piece[0] not in cut or other == member]
        for other, of_copies in enumerate(of_members)
        for of in of_copies
    ]
    return wholes_of(shapes, mine)


def wholes_of_teams(
    shapes: Shapes, of_members: Sequence[OfCopies], cut: Parts
) -> dict[str, WholeParameter]:
    """All parameters whole, those that members have cut put together; see `wholes_of_member`."""
    found = wholes_of_member(shapes, of_members, cut, 0)
    for name in found.keys() & cut.keys():
        only = [
            [[piece for piece in of if piece[0] == name] for of in copies] for copies in of_members
        ]
        of_all = [
            of[name]
            for member in range(len(of_members))  # some are with the first one alone
            if (of := wholes_of_member(shapes, only, cut, member))
        ]
        found[name] = _together(cut[name], of_all)
    return found


def by_member(of_pipes: OfCopies, cut: Parts) -> list[OfCopies]:
    """The pieces of each pipe, by the member of a team whose pipe it is."""
    size = next(iter(cut.values())).team.size if cut else 1
    return [of_pipes[member::size] for member in range(size)]


def _together(part: Part, of_members: Sequence[WholeParameter]) -> WholeParameter:
    masters = [of.master for of in of_members if of.master is not None]
    state = of_members[0].state
    tensors = {
        key: part.whole([of.state.tensors[key] for of in of_members]) for key in state.tensors
    }
    return WholeParameter(part.whole(masters) if masters else None, replace(state, tensors=tensors))
