"""The order of the collectives of one group of ranks."""

# A library's collectives on one group must be issued in one order on all of its ranks: another
# order gives wrong sums, or none ever. Ranks come to their buckets in different orders. So the
# lowest rank gives out tickets, and every rank issues its k-th collective of the group on ticket k.
#
#   ready      each copy that has its own gradient says so to the lowest rank of the group
#   announce   when all are ready that rank tells everyone the next ticket, on a queue of its own:
#              behind a collective that runs, it would wait for that one's end
#   collect    every rank issues the bucket of the next ticket, beside the tasks, and steps when it
#              has ended

from collections import Counter
from collections.abc import Hashable, Mapping

Which = tuple[int, int]  # a bucket of this rank: its stage, and its index there


class Tickets:
    """The tickets of one group, as one of its ranks knows them; they are counted over all steps."""

    def __init__(self, a_step: int, first_step: int) -> None:
        self._a_step = a_step
        self._given = self._next = a_step * first_step
        self._whose: dict[int, Which] = {}

    def give(self) -> int:
        """The number of the ticket that is given out next; for the lowest rank alone."""
        self._given += 1
        return self._given - 1

    def step_of(self, ticket: int) -> int:
        """The step that a ticket belongs to."""
        return ticket // self._a_step

    def is_known(self, ticket: int) -> bool:
        """It has been heard before whose ticket that is."""
        return ticket < self._next or ticket in self._whose

    def hear(self, ticket: int, whose: Which) -> None:
        """Note whose ticket that will be."""
        self._whose[ticket] = whose

    def is_for(self, which: Which) -> bool:
        """The next ticket is known, and is that bucket's."""
        return self._whose.get(self._next) == which

    def take(self) -> None:
        """Note that the next collective is issued."""
        del self._whose[self._next]
        self._next += 1


def tickets_of(groups: Mapping[Which, Hashable], first_step: int) -> dict[Which, Tickets]:
    """The tickets of each bucket's group.

    Args:
        groups: group of each bucket of this rank that a library adds up.
    """
    sizes = Counter(groups.values())
    tickets = {group: Tickets(size, first_step) for group, size in sizes.items()}
    return {which: tickets[group] for which, group in groups.items()}
