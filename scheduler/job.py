"""A job: the schedule that is decided once before anything runs, the same on every rank."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from .placement import Placement
from .policies import Nested, Policy


class Seat(NamedTuple):
    """A stage in one copy of the pipeline.

    Args:
        pipe: pipe (copy of the pipeline) index over all replicas, from 0.
        stage: stage index over the whole model, from 0.
    """

    pipe: int
    stage: int


@dataclass(frozen=True, slots=True)
class Job:
    """The schedule of a training or of an evaluation.

    Only a job divides numbers of microbatches into steps.

    Args:
        placement: map from stages to the ranks of a pipeline.
        policy: rule that says what runs first and which forward may start.
        microbatches: number of microbatches of a step and replica (gradient accumulation), at least
            1.
        replicas: number of copies of the pipeline (data parallelism), at least 1.
        cuts: indices of the layers at which stages begin, then the number of layers; () where no
            model is known.
        recomputed: number of first layers of a stage that run forward again before a backward
            (activation checkpointing), by stage; stages without any are left out.
        votes: True if optimizer steps wait for the norm of all gradients (gradient clipping).
        by_library: True if a library's collectives add gradients up, where each copy of a bucket
            has a rank of its own; False: messages do.
        slots: number of buckets whose offloaded state a rank may have on the device at a time; 0:
            state stays on the device.
        speculates: True if steps of offloaded state need not wait for the vote; then there is one.
        shards: True if each copy of a bucket keeps and steps a shard of its own (ZeRO); then there
            are several pipes, so every bucket has several copies.
        trains: False for an evaluation, which has no steps and any number of microbatches: the
            reader's END says how many. Its backwards carry nothing; they keep the order, caps and
            bounds of training.
    """

    placement: Placement
    policy: Policy
    microbatches: int
    replicas: int = 1
    cuts: tuple[int, ...] = ()
    recomputed: Mapping[int, int] = field(default_factory=dict)
    votes: bool = False
    by_library: bool = False
    slots: int = 0
    speculates: bool = False
    shards: bool = False
    trains: bool = True

    def __post_init__(self) -> None:
        pipes = self.placement.pipes
        if self.shards and self.pipes == 1:
            raise ValueError("shards of one copy; expected several pipes or replicas")
        if self.trains and (self.microbatches < 1 or self.microbatches % pipes):
            raise ValueError(
                f"{self.microbatches} microbatches on {pipes} pipes; expected a "
                f"multiple of {pipes}, at least 1"
            )

    @property
    def ranks(self) -> int:
        """Number of ranks of a pipeline."""
        return self.placement.ranks

    @property
    def pipes(self) -> int:
        """Number of copies of the sequence of stages, over all replicas."""
        return self.replicas * self.placement.pipes

    @property
    def stages(self) -> int:
        """Number of stages of a pipe."""
        return self.placement.stages

    @property
    def last_stage(self) -> int:
        """The stage that computes the loss."""
        return self.placement.stages - 1

    @property
    def splits(self) -> bool:
        """Backwards are split into input gradients and weight gradients."""
        return self.trains and self.policy.splits

    @property
    def microbatches_a_pipe(self) -> int:
        """Number of microbatches of a step that go through one pipe."""
        return self.microbatches // self.placement.pipes

    @property
    def microbatches_in_all(self) -> int:
        """Number of microbatches of a step, over all replicas."""
        return self.replicas * self.microbatches

    def evaluation(self) -> "Job":
        """The evaluation that belongs to this training: forwards along the first pipe, under nested
        caps."""
        return replace(
            self,
            placement=self.placement.first_pipe,
            policy=Nested(),
            votes=False,
            by_library=False,
            slots=0,
            speculates=False,
            shards=False,
            trains=False,
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
        """The pipe whose copy of a stage a rank of a replica holds."""
        return replica * self.placement.pipes + self.placement.pipe_of(rank, stage)

    def reader_of(self, pipe: int) -> Seat:
        """The seat on whose rank the pipe's batches are read: stage 0 of the first pipe of its
        replica."""
        return Seat(pipe - pipe % self.placement.pipes, 0)
