"""A placement says which rank of a pipeline holds which stage; a rank's stages are its chunks."""

from dataclasses import dataclass
from typing import Protocol


class Placement(Protocol):
    """Where the stages are; the only thing that knows how stages map to ranks."""

    @property
    def name(self) -> str: ...
    @property
    def ranks(self) -> int: ...
    @property
    def chunks(self) -> int:
        """Stages a rank."""
        ...

    @property
    def stages(self) -> int: ...
    def rank_of(self, stage: int) -> int: ...
    def stages_of(self, rank: int) -> tuple[int, ...]:
        """From the shallowest to the deepest."""
        ...


@dataclass(frozen=True, slots=True)
class Linear:
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

    def rank_of(self, stage: int) -> int:
        return stage

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return (rank,)


@dataclass(frozen=True, slots=True)
class Looped:
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

    def rank_of(self, stage: int) -> int:
        return stage % self.ranks

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(range(rank, self.stages, self.ranks))


@dataclass(frozen=True, slots=True)
class Vee:
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

    def rank_of(self, stage: int) -> int:
        return min(stage, self.stages - 1 - stage)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return (rank, self.stages - 1 - rank)


PLACEMENTS = ("linear", "looped", "vee")


def placed(name: str, ranks: int, chunks: int = 0) -> Placement:
    """The placement of that name.

    Args:
        name: one of `PLACEMENTS`.
        ranks: of a pipeline.
        chunks: stages a rank; 0: the placement's own, 2 for looped.
    Raises:
        ValueError: no such placement, or one with another number of chunks.
    """
    if name not in PLACEMENTS:
        raise ValueError(f"there is no placement {name!r}; expected one of {', '.join(PLACEMENTS)}")
    if name == "looped":
        return Looped(ranks, chunks or 2)
    placement: Placement = Linear(ranks) if name == "linear" else Vee(ranks)
    if chunks not in (0, placement.chunks):
        raise ValueError(
            f"placement {name} has {placement.chunks} stages a rank; chunks = {chunks} needs placement looped, or set chunks = 0"
        )
    return placement
