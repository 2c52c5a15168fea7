"""Numbers of microbatches, and the steps and reductions that they are of: nobody else divides."""

from collections.abc import Mapping
from typing import NamedTuple

from .placement import Placement
from .residencies import Residencies
from .task import AnyKind, Counts, Kind


class Marks(NamedTuple):
    """What the microbatches of a step begin and end on their pipe, by number within the step.

    Args:
        begins_run, ends_run: the microbatch is the first, or the last, that goes into a reduction.
        ends_step: the microbatch is the last of the step.
    """

    begins_run: tuple[bool, ...]
    ends_run: tuple[bool, ...]
    ends_step: tuple[bool, ...]


class StageJoints(NamedTuple):
    """How many joints a stage has that a team holds: places at which members exchange slices."""

    forward: int = 0  # in each of its forwards
    back: int = 0  # in each of its whole backwards, or of its input gradients


NO_JOINTS = StageJoints()


def joints_before(microbatch: int, piece: int, joints: int, pipes: int) -> int:
    """The number of joints of a kind of work on a stage that come before a piece, over all steps:
    the index of the joint behind it.

    Args:
        joints: joints of one task.
        pipes: pipes of a replica, of which the stage counts its own microbatches.
    """
    return microbatch // pipes * joints + piece


class Numbering:
    """How a job counts. Microbatches are numbered on over steps; so are reductions, of which a step
    has some."""

    __slots__ = ()

    placement: Placement
    microbatches: int
    replicas: int
    reductions: int
    drawn: int
    trains: bool
    residencies: Residencies | None
    joints: Mapping[int, StageJoints]

    @property
    def microbatches_a_pipe(self) -> int:
        """Number of microbatches of a step that go through one pipe."""
        return self.microbatches // self.placement.pipes

    @property
    def microbatches_in_all(self) -> int:
        """Number of microbatches of a step, over all replicas."""
        return self.replicas * self.drawn_a_step

    @property
    def drawn_a_step(self) -> int:
        """Number of microbatches that each replica's reader draws in a step."""
        return self.drawn or self.microbatches

    def step_of(self, number: int) -> tuple[int, int]:
        """The step of a microbatch, and the microbatch's number within it."""
        return divmod(number, self.microbatches)

    def place_in_batch(self, number: int, replica: int) -> tuple[int, int]:
        """The step of a microbatch, and its index within it over all replicas.

        Args:
            number: running number of the microbatch: of those of its replica, or of those of all
                where replicas share them.
            replica: index of the replica.
        """
        if self.drawn:
            return divmod(number, self.microbatches_in_all)
        step, within = self.step_of(number)
        return step, replica * self.microbatches + within

    def first_of(self, step: int) -> int:
        """The number of a step's first microbatch."""
        return step * self.microbatches

    def begins_a_step(self, number: int) -> bool:
        """The microbatch is the first of a step that its pipe gets."""
        return self.trains and number % self.microbatches < self.placement.pipes

    def ends_a_step(self, number: int) -> bool:
        """The microbatch is the last of a step that its pipe gets."""
        return (
            self.trains and number % self.microbatches + self.placement.pipes >= self.microbatches
        )

    def run_of(self, number: int) -> int:
        """The number, over all steps, of the reduction that a microbatch's gradient goes into."""
        step, within = self.step_of(number)
        place = within // self.placement.pipes
        return step * self.reductions + place * self.reductions // self.microbatches_a_pipe

    def begins_a_run(self, number: int) -> bool:
        """The microbatch is the first of its pipe that goes into its reduction."""
        return self.begins_a_step(number) or (
            self.reductions > 1
            and self.run_of(number - self.placement.pipes) != self.run_of(number)
        )

    def ends_a_run(self, number: int) -> bool:
        """The microbatch is the last of its pipe that goes into its reduction."""
        return self.ends_a_step(number) or (
            self.reductions > 1
            and self.run_of(number + self.placement.pipes) != self.run_of(number)
        )

    def marks(self) -> Marks:
        """What each microbatch of a step begins and ends: the answers of `begins_a_run`,
        `ends_a_run` and `ends_a_step`, for who asks once a task."""
        numbers = range(self.microbatches)
        return Marks(
            tuple([self.begins_a_run(number) for number in numbers]),
            tuple([self.ends_a_run(number) for number in numbers]),
            tuple([self.ends_a_step(number) for number in numbers]),
        )

    def first_of_run(self, run: int) -> int:
        """The number of the first microbatch, of any pipe, that goes into a reduction."""
        step, within = divmod(run, self.reductions)
        place = -(-within * self.microbatches_a_pipe // self.reductions)
        return self.first_of(step) + place * self.placement.pipes

    def step_completed_by(self, reduction: int) -> int | None:
        """The step whose gradient a reduction completes; None where others follow in its step."""
        step, within = divmod(reduction + 1, self.reductions)
        return None if within else step - 1

    def a_step(self, counts: Counts, stage: int) -> int:
        """How many of what a kind of work, or a message of one sender, counts are in a step of a
        stage."""
        if counts is Counts.MICROBATCHES:
            return self.microbatches
        if counts in (Counts.JOINTS, Counts.BACK_JOINTS):
            joints = self.joints.get(stage, NO_JOINTS)
            a_task = joints.forward if counts is Counts.JOINTS else joints.back
            return self.microbatches_a_pipe * max(1, a_task)
        if counts is Counts.RESIDENCIES:
            return len(self.residencies.of_stage[stage]) if self.residencies else 1
        return self.reductions if counts is Counts.REDUCTIONS else 1

    def first_for(self, kind: AnyKind, stage: int, number: int) -> int:
        """The number of the first microbatch that some work on a stage is for: its own, or the
        first of its step; of a refresh, the first of the step behind its own."""
        if kind.of_a_microbatch:
            return number
        if kind is Kind.REFRESH:
            return self.first_of(number + 1)
        return self.first_of(number // self.a_step(kind.counts, stage))
