"""The places of a rank for stashes: what a forward keeps for its backward. The device may have
fewer of them than the policy holds."""

# A stash is that of one microbatch on one stage. Places on the device are of four sorts:
#
#   lasting      for a stash that stays from its forward to its backward
#   passing      for a stash that goes down after its forward, until it has gone
#   returning    for a stash that has come back, until its backward; one for each stage of the rank
#   gathering    for a stash on its way down, which is put together there
#
# A forward takes a lasting place if one is free, and a passing place otherwise. So what is made
# while room is short goes down: of all stashes of a stage, the newest is needed last. Stashes of
# deeper stages are needed sooner, so forwards leave one lasting place to each deeper stage of the
# rank. A stash comes back to the returning place of its stage, or to a lasting place if its
# backward is near.
#
# `model/saved.py` takes memory from the graph, and `store/scratch_stash.py` copies it. The brain
# counts what is *held* and what is *held on the device*: policies cap the first, places the second.
# Numbers without a copy are skipped in the counters of offloads and reloads (`Counters.skip`).

from collections.abc import Collection
from enum import Enum


class StashMove(Enum):
    """What a kind of work does with a stash."""

    MAKES = "forward"
    TAKES_DOWN = "offload"
    BRINGS_BACK = "reload"
    USES_UP = "whole backward, or weight gradient"

    __hash__ = object.__hash__


# Where teams hold stages a forward has its passing place while it waits for slices of others. With
# one place for all stages two members could have it for different stages, and each wait for the
# other's slices for ever. So each stage may have one there.
def least_places(chunks: int, team: int = 1) -> int:
    """The least number of places of a rank with so many stages, which a team of so many holds: none
    of them is lasting."""
    gathering, passing = 1, chunks if team > 1 else 1
    return gathering + passing + chunks


class StashPlaces:
    """The places of one rank, as its tasks take and free them.

    Args:
        places: number of stashes that the device has room for, at least `least_places`.
        team: number of members that hold the rank's stages together.
    Attributes:
        on_device: number of stashes that have memory on the device, but for what is gathered.
    """

    def __init__(self, places: int, stages: Collection[int], team: int = 1) -> None:
        spare = places - least_places(len(stages), team)
        # With one more a forward runs while the stash before it goes down.
        more = int(spare > len(stages))
        self._passing = (len(stages) if team > 1 else 1) + more
        self._lasting = spare - more
        self._returning = set(stages)
        self._deeper = {stage: sum(other > stage for other in stages) for stage in stages}
        self._back: dict[int, int] = {}  # the microbatch in the returning place, by stage
        self.on_device = 0

    def admits(self, move: StashMove, stage: int, is_near: bool = True) -> bool:
        """There is room for the work to start.

        Args:
            is_near: the stash is needed soon, if the work brings one back.
        """
        if move is StashMove.MAKES:
            return self._passing > 0 or self._may_stay(stage)
        if move is StashMove.BRINGS_BACK:
            return stage in self._returning or (is_near and self._lasting > 0)
        return True

    def make(self, stage: int) -> bool:
        """Take a place for the stash of a forward. Returns True if it stays there."""
        self.on_device += 1
        if self._may_stay(stage):
            self._lasting -= 1
            return True
        self._passing -= 1
        return False

    def take_down(self) -> None:
        """Free the place of a stash that has gone down."""
        self.on_device -= 1
        self._passing += 1

    def bring_back(self, stage: int, number: int) -> None:
        """Take a place for a stash that comes back."""
        self.on_device += 1
        if stage in self._returning:
            self._returning.remove(stage)
            self._back[stage] = number
        else:
            self._lasting -= 1

    def use_up(self, stage: int, number: int) -> None:
        """Free the place of a stash that nobody needs any more."""
        self.on_device -= 1
        if self._back.get(stage) == number:
            del self._back[stage]
            self._returning.add(stage)
        else:
            self._lasting += 1

    def _may_stay(self, stage: int) -> bool:
        return self._lasting > self._deeper[stage]
