"""What a policy may look at of a rank: see `policies.policy.View`."""

# What a policy sees is a matter of proof: `policies/policy.py` argues with counts of this rank
# alone. So a view has no clock, no news of other ranks but what messages said, and no way to change
# what is counted.

from collections.abc import Mapping
from typing import Any

from .counters import Counters, Gate
from .job import Job
from .lacks import Coordinates
from .message import Meaning, Message
from .placement import Placement
from .resources import Resources
from .stash_places import StashMove
from .task import AnyKind, Kind, Task


class RankView:
    """The counters of a rank.

    Attributes:
        in_flight: number of microbatches under way here, over all stages: forward started, backward
            (or input gradient) not. A backward that runs still counts for memory, but work that is
            started now runs after it on the same device. Counting it would leave a stream idle
            between the last backward and the next forward.
        held: number of microbatches that hold memory here, over all stages: forward started, weight
            gradient not.
        memo: what policies have worked out from what has started here; empty after each start.
        reached: what policies keep of how far a plan has come.
        end: number of microbatches there are, once a reader has said so; None before.
    """

    job: Job
    placement: Placement
    microbatches: int
    in_flight: int
    held: int
    memo: dict[Any, Any]
    reached: dict[Any, int]
    end: int | None
    pipe_of: dict[int, int]  # pipe of each stage of this rank
    _counters: Mapping[int, Counters]
    _resources: Resources

    def started(self, kind: AnyKind, stage: int) -> int:
        """Number of tasks of a kind that have started on a stage of this rank; of one with joints,
        its first piece."""
        counters = self._counters[stage]
        started = counters.count[kind] // self.placement.pipes
        if counters.joints and counters.part[kind] and kind in counters.joints:
            return started + 1
        return started

    def started_whole(self, kind: AnyKind, stage: int) -> int:
        """Number of tasks of a kind of which all pieces have started on a stage of this rank."""
        return self._counters[stage].count[kind] // self.placement.pipes

    # In flight ends at the start of a backward, so that a stream takes the next forward behind it.
    def in_flight_of(self, stage: int) -> int:
        """Number of microbatches in flight on one stage of this rank."""
        back = Kind.INPUT if self.job.splits else Kind.BACKWARD
        counters = self._counters[stage]
        # in pieces; `started` counts those with joints
        under_way = counters.part[Kind.FORWARD] > 0 and Kind.FORWARD not in counters.joints
        return self.started(Kind.FORWARD, stage) + under_way - self.started(back, stage)

    def forwards_left(self, task: Task) -> bool:
        """Some forwards of the task's step have not started on the task's stage."""
        counters = self._counters[task.stage]
        under_way = counters.part[Kind.FORWARD] > 0  # in pieces
        started = counters.count[Kind.FORWARD] + under_way * self.placement.pipes
        if self.end is not None and started >= self.end:
            return False
        step = task.microbatch // self.microbatches
        return started < (step + 1) * self.microbatches

    @property
    def held_on_device(self) -> int:
        """Number of microbatches that hold memory on the device, over all stages: `held` where
        nothing of them is offloaded."""
        return self._resources.on_device(self.held)

    def has_room(self, move: StashMove, stage: int, is_near: bool = True) -> bool:
        """The device has room for the stash that work on a stage makes or brings back."""
        return self._resources.admits_stash(move, stage, is_near)

    def has_stepped(self, stage: int, residency: int) -> bool:
        """The weights that a residency of a stage is for have been stepped."""
        return self._counters[stage].count[Gate.STEPPED] > residency

    def has_come(self, meaning: Meaning, stage: int, number: int) -> bool:
        """Every message of that meaning up to and including that number is here."""
        return self._counters[stage].count[meaning] > number

    def is_here(self, message: Message) -> bool:
        """The message is addressed to a stage of this rank."""
        return self.pipe_of.get(message.stage) == message.pipe

    def place_of(self, message: Message) -> Coordinates:
        """The coordinates of the rank that a message is for."""
        return Coordinates(*self.job.place_of(message.pipe, message.stage))
