"""The order of the collectives of one group of ranks."""

# A library's collectives on one group must be issued in one order on all of its ranks: another
# order gives wrong sums, or none ever. Ranks come to their buckets in different orders. So the
# lowest rank gives out turns, and every rank issues its k-th collective of the group on turn k.

from collections import Counter
from collections.abc import Hashable, Mapping

Which = tuple[int, int]  # a bucket of this rank: its stage, and its index there


class Turns:
    """The turns of one group, as one of its ranks knows them; they are counted over all steps."""

    def __init__(self, a_step: int, first_step: int) -> None:
        self._a_step = a_step
        self._given = self._next = a_step * first_step
        self._whose: dict[int, Which] = {}

    def give(self) -> int:
        """The number of the turn that is given out next; for the lowest rank alone."""
        self._given += 1
        return self._given - 1

    def step_of(self, turn: int) -> int:
        """The step that a turn belongs to."""
        return turn // self._a_step

    def is_known(self, turn: int) -> bool:
        """It has been heard before whose turn that is."""
        return turn < self._next or turn in self._whose

    def hear(self, turn: int, whose: Which) -> None:
        """Note whose turn that will be."""
        self._whose[turn] = whose

    def is_for(self, which: Which) -> bool:
        """The next turn is known, and is that bucket's."""
        return self._whose.get(self._next) == which

    def take(self) -> None:
        """Note that the next collective is issued."""
        del self._whose[self._next]
        self._next += 1


def turns_of(groups: Mapping[Which, Hashable], first_step: int) -> dict[Which, Turns]:
    """The turns of each bucket's group.

    Args:
        groups: group of each bucket of this rank that is added up in turns.
    """
    sizes = Counter(groups.values())
    turns = {group: Turns(size, first_step) for group, size in sizes.items()}
    return {which: turns[group] for which, group in groups.items()}
