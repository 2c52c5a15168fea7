"""A placement says which rank of a pipeline holds which stage; a rank's stages are its chunks.

A *pipe* is one copy of the sequence of stages. Most placements have one; a bidirectional one has
two over the same ranks, and microbatch n goes through pipe n mod 2. Over all replicas pipes are
numbered on, those of replica 0 first.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol


class Placement(Protocol):
    """Where the stages are; the only thing that knows how stages and pipes map to ranks."""

    __slots__ = ()
    pipes: int = 1

    @property
    def name(self) -> str: ...
    @property
    def ranks(self) -> int: ...
    @property
    def chunks(self) -> int:
        """Stages a rank, over all pipes."""
        ...

    @property
    def stages(self) -> int:
        """Of one pipe."""
        ...

    @abstractmethod
    def rank_of(self, stage: int, pipe: int = 0) -> int: ...
    @abstractmethod
    def stages_of(self, rank: int) -> tuple[int, ...]:
        """From the shallowest to the deepest; no rank holds one stage of two pipes."""
        ...

    def pipe_of(self, rank: int, stage: int) -> int:
        """Which pipe it is of which the rank holds the stage."""
        return 0

    def place_of(self, pipe: int, stage: int) -> tuple[int, int]:
        """The replica, and the rank in it, that hold a stage of a pipe; numbered over all
        replicas."""
        replica, of_replica = divmod(pipe, self.pipes)
        return replica, self.rank_of(stage, of_replica)

    @property
    def share(self) -> float:
        """What part of a rank's work on a microbatch, evenly divided, a stage does."""
        return self.ranks / self.stages

    @property
    def first_pipe(self) -> "Placement":
        """Where the stages of the first pipe are: for what needs no other, such as an
        evaluation."""
        return self

    def seats(self) -> Iterator[tuple[int, int]]:
        """For each rank a pipe and a stage that it holds."""
        for rank in range(self.ranks):
            stage = self.stages_of(rank)[0]
            yield self.pipe_of(rank, stage), stage


@dataclass(frozen=True, slots=True)
class Linear(Placement):
    """Stage s on rank s.

    >>> Linear(ranks=3).stages_of(1)
    (1,)
    """

    ranks: int
    name = "linear"
    chunks = 1

    @property
    def stages(self) -> int:
        return self.ranks

    def rank_of(self, stage: int, pipe: int = 0) -> int:
        return stage

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return (rank,)


@dataclass(frozen=True, slots=True)
class Looped(Placement):
    """Stage s on rank s mod p: the pipeline goes round the ranks once a chunk.

    >>> Looped(ranks=3, chunks=2).stages_of(1)
    (1, 4)
    """

    ranks: int
    chunks: int = 2
    name = "looped"

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    def rank_of(self, stage: int, pipe: int = 0) -> int:
        return stage % self.ranks

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(range(rank, self.stages, self.ranks))


@dataclass(frozen=True, slots=True)
class Vee(Placement):
    """Stages 0..p-1 down the ranks and p..2p-1 back up: the first and the last stage are on rank 0.

    >>> Vee(ranks=3).stages_of(1)
    (1, 4)
    """

    ranks: int
    name = "vee"
    chunks = 2

    @property
    def stages(self) -> int:
        return 2 * self.ranks

    def rank_of(self, stage: int, pipe: int = 0) -> int:
        return min(stage, self.stages - 1 - stage)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return (rank, self.stages - 1 - rank)


@dataclass(frozen=True, slots=True)
class Bidirectional(Placement):
    """Two pipes: stage s of the first on rank s, of the second on rank p-1-s. Every stage is held
    twice; p is even.

    >>> Bidirectional(ranks=4).stages_of(1)
    (1, 2)
    """

    ranks: int
    name = "bidirectional"
    chunks = 2
    pipes = 2

    @property
    def stages(self) -> int:
        return self.ranks

    def rank_of(self, stage: int, pipe: int = 0) -> int:
        return self.ranks - 1 - stage if pipe else stage

    def stages_of(self, rank: int) -> tuple[int, ...]:
        other = self.ranks - 1 - rank
        return (min(rank, other), max(rank, other))

    def pipe_of(self, rank: int, stage: int) -> int:
        return int(stage != rank)

    @property
    def first_pipe(self) -> Placement:
        return Linear(self.ranks)


PLACEMENTS = ("linear", "looped", "vee", "bidirectional")


def placement_by_name(name: str, ranks: int, chunks: int = 0) -> Placement:
    """The placement of that name.

    Args:
        name: one of `PLACEMENTS`.
        ranks: of a pipeline.
        chunks: stages a rank; 0: the placement's own, 2 for looped.
    Raises:
        ValueError: no such placement, or one with another number of chunks or ranks.
    """
    if name not in PLACEMENTS:
        raise ValueError(f"there is no placement {name!r}; expected one of {', '.join(PLACEMENTS)}")
    if name == "looped":
        return Looped(ranks, chunks or 2)
    if name == "bidirectional" and ranks % 2:
        raise ValueError(
            f"placement bidirectional takes an even number of ranks; start {ranks + 1} ranks a "
            f"pipeline, not {ranks}"
        )
    kinds: dict[str, type[Linear | Vee | Bidirectional]] = {
        "linear": Linear,
        "vee": Vee,
        "bidirectional": Bidirectional,
    }
    placement: Placement = kinds[name](ranks)
    if chunks not in (0, placement.chunks):
        raise ValueError(
            f"placement {name} has {placement.chunks} stages a rank; chunks = {chunks} needs "
            "placement looped, or set chunks = 0"
        )
    return placement
