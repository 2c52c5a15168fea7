"""A placement says which rank of a pipeline holds which stage; a rank's stages are its chunks."""

# A *pipe* is one copy of the sequence of stages. Most placements have one; a bidirectional one has
# two over the same ranks, and microbatch n goes through pipe n mod 2. Over all replicas pipes are
# numbered on, those of replica 0 first.

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from .plural import plural


class Placement(Protocol):
    """The map from stages and pipes to ranks; nothing else knows it."""

    __slots__ = ()
    pipes: int = 1

    @property
    def name(self) -> str: ...
    @property
    def ranks(self) -> int:
        """Number of ranks of a pipeline."""
        ...

    @property
    def chunks(self) -> int:
        """Number of stages that a rank holds, over all pipes."""
        ...

    @property
    def stages(self) -> int:
        """Number of stages of one pipe."""
        ...

    @abstractmethod
    def rank_of(self, stage: int, pipe: int = 0) -> int:
        """The rank of a pipeline that holds a stage; `pipe` is an index within the replica."""
        ...

    @abstractmethod
    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, from the shallowest to the deepest.

        No rank holds the same stage for two pipes.
        """
        ...

    def pipe_of(self, rank: int, stage: int) -> int:
        """The pipe, within a replica, whose copy of the stage the rank holds."""
        return 0

    def place_of(self, pipe: int, stage: int) -> tuple[int, int]:
        """The replica, and the rank in it, that hold a stage of a pipe.

        Args:
            pipe: pipe index over all replicas.
            stage: stage index over the whole model.
        """
        replica, of_replica = divmod(pipe, self.pipes)
        return replica, self.rank_of(stage, of_replica)

    @property
    def share(self) -> float:
        """The share of a rank's work on one microbatch that one stage does, if all stages cost the
        same."""
        return self.ranks / self.stages

    @property
    def held(self) -> list[tuple[int, ...]]:
        """The stages of each rank."""
        return [self.stages_of(rank) for rank in range(self.ranks)]

    @property
    def first_pipe(self) -> "Placement":
        """The placement of the first pipe alone, for work that needs one copy, such as an
        evaluation."""
        return self

    def stage_copies(self) -> Iterator[tuple[int, int]]:
        """For each rank, the pipe and stage of the shallowest stage that it holds: an address of
        the rank."""
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
    """Two pipes: stage s is on rank s for the first pipe and on rank p-1-s for the second.

    Every stage is held twice, and p is even.

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
        ranks: number of ranks of a pipeline; even for "bidirectional".
        chunks: number of stages that a rank holds; 0 is the placement's own, 2 for "looped".
    Raises:
        ValueError: there is no such placement, or it takes no such number of chunks or ranks.
    """
    if name not in PLACEMENTS:
        raise ValueError(f"there is no placement {name!r}; expected one of {', '.join(PLACEMENTS)}")
    if name == "looped":
        return Looped(ranks, chunks or 2)
    if name == "bidirectional" and ranks % 2:
        raise ValueError(
            "placement bidirectional takes an even number of ranks; start "
            f"{plural(ranks + 1, 'rank')} a pipeline, not {ranks}"
        )
    kinds: dict[str, type[Linear | Vee | Bidirectional]] = {
        "linear": Linear,
        "vee": Vee,
        "bidirectional": Bidirectional,
    }
    placement: Placement = kinds[name](ranks)
    if chunks not in (0, placement.chunks):
        raise ValueError(
            f"placement {name} has {plural(placement.chunks, 'stage')} a rank; chunks = {chunks} "
            "needs placement looped, or set chunks = 0"
        )
    return placement
