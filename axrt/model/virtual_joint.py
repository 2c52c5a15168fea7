"""Joints where a rank has several virtual members: what leaves it, and what each of them gets."""

# V virtual members cut a stage into as many shares, and each of t ranks has V / t of them, one
# after the other. What they compute is what V ranks would: bits depend on V alone.
#
#     put together   the tokens of each virtual member leave once for each other rank
#     added up       the addends of a rank's own are added up for each virtual member of another
#                    rank. They are a branch of the tree in which all are, so that the sum has the
#                    same bits, and as much leaves as of one member (in float32)

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
        here: each of them, in order.
        team: this member of the team, and how many there are.
    Raises:
        ModelError: they come to different joints.
    """

    def __init__(self, here: Sequence[Leaving], team: Team) -> None:
        self._here, self._team = here, team
        self._first = team.member * len(here)
        self._adds, *others = (one.are_addends for one in here)
        if any(other != self._adds for other in others):
            raise ModelError(
                "the shares of a layer (parallel.tensor_shards) come to different joints; expected "
                "the same Sum and Gathered from each"
            )

    def outgoing(self, to: int) -> tuple[Slices, ...]:
        """What leaves for another member: an entry for each virtual member, in the order of either
        rank's."""
        first = to * len(self._here)
        every = [
            [one.outgoing(first + place) for one in self._here] for place in range(len(self._here))
        ]
        return tuple(
            tuple(
                widened_sum([of[index] for of in every[place]]) if adds else every[0][place][index]
                for index, adds in enumerate(self._adds)
            )
            for place in range(len(self._here))
        )

    def came(self, came: Mapping[int, tuple[Slices, ...]]) -> list[Came]:
        """What each virtual member here gets of all others.

        Args:
            came: what `outgoing` gave on each other member.
        """
        return [
            self._of_this_rank(place) | self._of_others(place, came)
            for place in range(len(self._here))
        ]

    def _of_this_rank(self, place: int) -> dict[int, CameOf]:
        return {
            self._first + other: one.outgoing(self._first + place)
            for other, one in enumerate(self._here)
            if other != place
        }

    def _of_others(self, place: int, came: Mapping[int, tuple[Slices, ...]]) -> dict[int, CameOf]:
        found: dict[int, CameOf] = {}
        for member, of_virtual in came.items():
            for other, slices in enumerate(of_virtual):
                addends = of_virtual[place] if other == 0 else (None,) * len(slices)
                found[member * len(self._here) + other] = tuple(
                    addend if adds else own
                    for own, addend, adds in zip(slices, addends, self._adds, strict=True)
                )
        return found
