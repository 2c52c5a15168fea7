"""For stages that keep little more than their inputs (`memory.recompute`): forwards run again while
gradients are under way."""

from dataclasses import dataclass

from ..placement import Placement
from ..task import Kind, Task
from .policy import Bounds, Policy, View


@dataclass(frozen=True, slots=True)
class Merak(Policy):
    """Backwards before forwards before recomputation, two of which may be ahead; rank r has at most
    p - r microbatches in flight.

    Bound: p - r; up to two of them with all their activations.
    Source: Lai et al., "Merak", TPDS 2023, section V (shifted critical path schedule).
    """

    name = "merak"
    splits = False
    placements = ("linear",)
    recomputes_ahead = 2

    def key(self, task: Task, view: View) -> tuple[int, ...]:
        return (task.kind is Kind.FORWARD, task.microbatch)

    def admits(self, task: Task, view: View) -> bool:
        return task.kind is not Kind.FORWARD or view.in_flight < view.ranks - view.rank

    def bounds(self, placement: Placement, rank: int, microbatches: int) -> Bounds:
        return Bounds(placement.ranks - rank, placement.ranks - rank)


@dataclass(frozen=True, slots=True)
class Varuna(Policy):
    """Backwards first; where the gradient is late the next forward runs, while fewer than 2p
    microbatches are in flight.

    Bound: 2p, on every rank: inputs of stages take little, and with p the first rank could not run
    ahead of a late gradient.
    Source: Athlur et al., "Varuna", EuroSys 2022, section 3.2 (opportunistic scheduling).
    """

    name = "varuna"
    splits = False
    placements = ("linear",)

    def key(self, task: Task, view: View) -> tuple[int, ...]:
        return (task.kind is Kind.FORWARD, task.microbatch)

    def admits(self, task: Task, view: View) -> bool:
        return task.kind is not Kind.FORWARD or view.in_flight < 2 * view.ranks

    def bounds(self, placement: Placement, rank: int, microbatches: int) -> Bounds:
        return Bounds(2 * placement.ranks, 2 * placement.ranks)
