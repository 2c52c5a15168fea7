"""A job: what is decided once, before anything runs, and is the same on every rank."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from .placement import Placement
from .policies import Nested, Policy


class Seat(NamedTuple):
    """A stage in one copy of the pipeline.

    Args:
        pipe: which copy, numbered over all replicas.
        stage: of the model.
    """

    pipe: int
    stage: int


@dataclass(frozen=True, slots=True)
class Job:
    """The schedule of a training or of an evaluation; the only place that divides by microbatches.

    Args:
        placement: which rank of a pipeline holds which stage.
        policy: what runs first, and which forward may start.
        microbatches: per step and replica, at least 1.
        replicas: copies of the pipeline (data parallelism).
        cuts: layers at which stages begin, and the number of layers; () where no model is known.
        recomputed: how many layers of a stage run again before its backward (activation
            checkpointing), the first ones; stages with none are left out.
        votes: optimizer steps wait for the norm of all gradients.
        trains: False for an evaluation. It has any number of microbatches, which the reader's END
            tells, and no steps; its backwards carry nothing, but keep order, caps and bounds those
            of training.
    """

    placement: Placement
    policy: Policy
    microbatches: int
    replicas: int = 1
    cuts: tuple[int, ...] = ()
    recomputed: Mapping[int, int] = field(default_factory=dict)
    votes: bool = False
    trains: bool = True

    @property
    def ranks(self) -> int:
        """Of a pipeline."""
        return self.placement.ranks

    @property
    def pipes(self) -> int:
        """Copies of the sequence of stages, over all replicas."""
        return self.replicas * self.placement.pipes

    @property
    def stages(self) -> int:
        """Of a pipe."""
        return self.placement.stages

    @property
    def last_stage(self) -> int:
        """The stage that computes the loss."""
        return self.placement.stages - 1

    @property
    def splits(self) -> bool:
        """Backwards are input gradients and weight gradients."""
        return self.trains and self.policy.splits

    @property
    def microbatches_a_pipe(self) -> int:
        """Per step."""
        return self.microbatches // self.placement.pipes

    def evaluation(self) -> "Job":
        """Forwards alone, along the first pipe; microbatches run ahead of each other as its caps
        allow."""
        return replace(
            self, placement=self.placement.first_pipe, policy=Nested(), votes=False, trains=False
        )

    def step_of(self, number: int) -> tuple[int, int]:
        """The step of a microbatch, and the microbatch's number within it."""
        return divmod(number, self.microbatches)

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

    def __str__(self) -> str:
        return (
            f"{self.policy.name} on {self.placement.name} placement, {self.ranks} ranks, "
            f"{self.microbatches} microbatches"
        )

    def seats(self) -> Iterator[Seat]:
        """Every stage of every pipe, pipe by pipe."""
        for pipe in range(self.pipes):
            for stage in range(self.placement.stages):
                yield Seat(pipe, stage)

    def pipe_of(self, replica: int, rank: int, stage: int) -> int:
        """Which pipe it is of which that rank of a replica holds the stage."""
        return replica * self.placement.pipes + self.placement.pipe_of(rank, stage)

    def reader_of(self, pipe: int) -> Seat:
        """The seat on whose rank the pipe's batches are read: of its replica's first pipe the first
        stage."""
        return Seat(pipe - pipe % self.placement.pipes, 0)
