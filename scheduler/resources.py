"""What the work of a rank shares: places of which there are a few, and tickets."""

#   slots, host slots, gathered stages   a number of each; a row takes one and another row frees it
#   places for stashes                   on the device; see `stash_places.py`
#   tickets of collectives               in the order that the group's lowest rank gives
#   gathered stages in their order       the same on all ranks of a group

from collections.abc import Mapping

from .counters import Counters
from .job import Job
from .rules import Pool, Row
from .stash_places import StashMove, StashPlaces
from .task import Kind, Task
from .tickets import Tickets, Which


class Resources:
    """Places and tickets of one rank.

    Args:
        tickets: tickets of the groups that buckets here belong to, by stage and bucket.
        counters_of: counters of each stage.
    Attributes:
        tickets: see above.
        in_order: stages of this rank in the order in which their weights are gathered.
    """

    def __init__(
        self,
        job: Job,
        rank: int,
        tickets: Mapping[Which, Tickets],
        counters_of: Mapping[int, Counters],
    ) -> None:
        self.tickets, self._counters = tickets, counters_of
        self._gathered = job.residencies.capacity if job.residencies else 0
        self._free = {
            Pool.SLOTS: job.slots,
            Pool.ON_HOST: job.host_slots,
            Pool.WHOLE: self._gathered,
        }
        offloads_stash = job.offloads_stash(rank)
        self._stash = (
            StashPlaces(job.held_on_device, counters_of, job.team) if offloads_stash else None
        )
        self.in_order = job.residencies.order[rank] if job.residencies else ()
        self._residencies_begun = 0

    def on_device(self, held: int) -> int:
        """Of the microbatches that hold memory here, how many hold it on the device."""
        return self._stash.on_device if self._stash else held

    def admits_stash(self, move: StashMove, stage: int, is_near: bool = True) -> bool:
        """The device has a place for the stash that work on a stage makes or brings back."""
        return self._stash is None or self._stash.admits(move, stage, is_near)

    @property
    def none_gathered(self) -> bool:
        """All whole weights have been let go."""
        return self._free[Pool.WHOLE] == self._gathered

    def may_go(self, row: Row, task: Task) -> bool:
        """The task needs no ticket, or the next one of its group is for its bucket; and residencies
        begin in their order."""
        which = task.stage, task.part
        order = self.in_order
        if row.in_order and order[self._residencies_begun % len(order)] != task.stage:
            return False
        return not row.by_ticket or self.tickets[which].is_for(which)

    def has_place(self, row: Row) -> bool:
        """The work takes nothing that a rank has a few of, or one is free."""
        return row.takes is None or self._free[row.takes] > 0

    def take(self, row: Row, whole: bool, task: Task) -> None:
        """Take the ticket and the places that a task takes when it starts.

        Args:
            whole: it is no piece, or the last one.
        """
        _, stage, number, part = task
        if row.by_ticket:
            self.tickets[stage, part].take()
        if row.takes is not None:
            self._free[row.takes] -= 1
            self._residencies_begun += row.in_order
        if self._stash is None or row.stash is None or not whole:
            return
        if row.stash is StashMove.BRINGS_BACK:
            self._stash.bring_back(stage, number)
        elif row.stash is StashMove.MAKES and self._stash.make(stage):
            # One that stays on the device is neither taken down nor brought back.
            for kind in (Kind.OFFLOAD, Kind.RELOAD):
                self._counters[stage].skip(kind, number)

    def give_back(self, row: Row, stage: int, number: int) -> None:
        """Free the places that a task, which has finished, was the last to need."""
        if row.frees is not None:
            self._free[row.frees] += 1
        if self._stash is None:
            return
        if row.stash is StashMove.TAKES_DOWN:
            self._stash.take_down()
        elif row.stash is StashMove.USES_UP:
            self._stash.use_up(stage, number)
