"""A residency is a time in which a rank has the whole weights of a stage, where each copy keeps a
shard of them (ZeRO stage 3)."""

# It begins when the weights are gathered from all copies, and ends when they are let go. A step has
# the same residencies on every copy of a stage, so each of them has a number, which counts on over
# steps.

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from .task import AnyKind, Kind


class Residency(NamedTuple):
    """The tasks of a stage and pipe that have run by the end of a residency, counted from the
    beginning of the step.
    """

    forwards: int  # number of forwards
    recomputed: int  # number of forwards that have run again
    backwards: int  # number of whole backwards, or of input gradients

    def until(self, kind: AnyKind) -> int:
        """The number of tasks of a kind that have run by the end of the residency."""
        return self[_COLUMNS[kind]]


# The kinds of work that read weights. A weight gradient that comes later reads what was kept.
_COLUMNS: Mapping[AnyKind, int] = {
    Kind.FORWARD: 0,
    Kind.RECOMPUTE: 1,
    Kind.BACKWARD: 2,
    Kind.INPUT: 2,
}
READERS = tuple(_COLUMNS)


# Weights come by stages, not in chunks of one size (PatrickStar's). Stages have the sizes that
# layers have, whole pages, so 0.99 of scratch is used without a search; who wants less at a time
# gives a rank more stages. Which stage goes is what residencies know already.
@dataclass(frozen=True, slots=True)
class Residencies:
    """The residencies of a step."""

    capacity: int  # number of stages whose weights a rank may have whole at a time, at least 1
    of_stage: tuple[
        tuple[Residency, ...], ...
    ]  # residencies of each stage, in order; at least one each
    # for each rank of a pipeline, its stages in the order in which their residencies begin
    order: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if self.capacity < 1 or not all(self.of_stage):
            raise ValueError(f"{self}; expected room for a stage, and a residency of each")
