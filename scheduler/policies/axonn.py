"""The rule of AxoNN: a limit where microbatches enter, and nothing else."""

from dataclasses import dataclass

from ..placement import Placement
from ..task import Kind, Task
from .policy import Bounds, Policy, View


# The last rank of `axonn` has a cap of one. It followed from the order of tasks, until runs cut
# backwards within a step: a piece that runs is no head, so a forward came first.
@dataclass(frozen=True, slots=True)
class AxoNN(Policy):
    """Every rank runs the microbatches that have arrived, backward first; rank 0 starts one while
    fewer than `limit` are in flight.

    Bound: `limit` on every rank, since a microbatch in flight anywhere is in flight on rank 0; 1 on
    the last, whose backward is ready with its forward. There a forward also waits for the pieces of
    a backward: reductions within a step cut it, and one that runs has no head that could be first.
    Source: Singh and Bhatele, "AxoNN", IPDPS 2022, section IV (`pipeline limit`, there equal to
    G_inter).
    """

    limit: int = 0  # microbatches in the pipeline; 0: as many as there are ranks
    name = "axonn"
    splits = False
    placements = ("linear",)

    def key(self, task: Task, view: View) -> tuple[int, ...]:
        return (task.kind is Kind.FORWARD, task.microbatch)

    def admits(self, task: Task, view: View) -> bool:
        return task.kind is not Kind.FORWARD or view.in_flight < self._most(view.rank, view.ranks)

    def bounds(self, placement: Placement, rank: int, microbatches: int) -> Bounds:
        most = self._most(rank, placement.ranks)
        return Bounds(most, most)

    def _most(self, rank: int, ranks: int) -> int:
        return 1 if rank == ranks - 1 else self.limit or ranks
