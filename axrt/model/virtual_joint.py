"""Joints where a rank has several virtual members: what leaves it, and what each of them gets."""

# Virtual members cut a stage into parts, and each rank of a team has equally many of them, one
# after the other. What they compute is what as many ranks would: bits depend on their number alone.
#
#     put together   the tokens of each virtual member leave once for each other rank
#     added up       the addends of a rank's own are added up for each virtual member of another
#                    rank. They are a branch of the tree in which all are, so the sum has the same
#                    bits. As many elements leave as of one member, and they are wide

from collections.abc import Mapping, Sequence
from typing import Protocol

from axrt.errors import ModelError

from .joints import Came, CameOf, Slices, Team, widened_sum


class Leaving(Protocol):
    """One virtual member at a joint, of a forward or a backward."""

    @property
    def are_addends(self) -> list[bool]:
        """For each of the slices that leave, whether it is to be added up."""

    def outgoing(self, to: int) -> Slices:
        """The slices for another virtual member."""


class VirtualJoint:
    """One joint of a microbatch, as the virtual members of a rank come to it.

    Args:
        members: each of them, in order.
        team: this member of the team, and how many there are.
    Raises:
        ModelError: they come to different joints.
    """

    def __init__(self, members: Sequence[Leaving], team: Team) -> None:
        self._members, self._team = members, team
        self._first = team.member * len(members)
        self._adds, *others = (one.are_addends for one in members)
        if any(other != self._adds for other in others):
            raise ModelError(
                "the virtual members of a rank (parallel.tensor_shards) come to different joints; "
                "expected the same Sum and Gathered from each"
            )

    def outgoing(self, to: int) -> tuple[Slices, ...]:
        """What leaves for another member: an entry for each virtual member, in the order of either
        rank's."""
        count = len(self._members)
        adds = any(self._adds)
        # Tokens are the same for all of them; addends are those of one.
        every = [
            [one.outgoing(to * count + place) for one in self._members]
            for place in range(count if adds else 1)
        ]
        return tuple(
            tuple(
                widened_sum([of[index] for of in every[place]]) if is_added else own
                for index, (own, is_added) in enumerate(zip(slices, self._adds, strict=True))
            )
            for place, slices in enumerate(every[0])
        )

    def came(self, came: Mapping[int, tuple[Slices, ...]]) -> list[Came]:
        """What each virtual member here gets of all others.

        Args:
            came: what `outgoing` gave on each other member.
        """
        return [
            self._of_this_rank(place) | self._of_others(place, came)
            for place in range(len(self._members))
        ]

    def _of_this_rank(self, place: int) -> dict[int, CameOf]:
        return {
            self._first + other: one.outgoing(self._first + place)
            for other, one in enumerate(self._members)
            if other != place
        }

    def _of_others(self, place: int, came: Mapping[int, tuple[Slices, ...]]) -> dict[int, CameOf]:
        found: dict[int, CameOf] = {}
        for member, of_virtual in came.items():
            for other, slices in enumerate(of_virtual):
                addends = of_virtual[place] if other == 0 else (None,) * len(slices)
                found[member * len(self._members) + other] = tuple(
                    addend if adds else own
                    for own, addend, adds in zip(slices, addends, self._adds, strict=True)
                )
        return found
