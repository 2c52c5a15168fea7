"""A placement says which rank of a pipeline holds which stage."""

from dataclasses import dataclass
from typing import Protocol


class Placement(Protocol):
    """Where the stages are; the only thing that knows how stages map to ranks."""

    @property
    def name(self) -> str: ...
    @property
    def ranks(self) -> int: ...
    @property
    def stages(self) -> int: ...
    def rank_of(self, stage: int) -> int: ...
    def stages_of(self, rank: int) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class Linear:
    """Stage s on rank s.

    >>> Linear(ranks=3).stages_of(1)
    (1,)
    """

    ranks: int
    name = "linear"

    @property
    def stages(self) -> int:
        return self.ranks

    def rank_of(self, stage: int) -> int:
        return stage

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return (rank,)
