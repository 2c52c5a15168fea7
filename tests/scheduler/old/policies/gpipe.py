"""The rule of GPipe: the step in two halves."""

from dataclasses import dataclass

from ..placement import Placement
from ..task import Kind, Task
from .policy import Bounds, Policy, View


@dataclass(frozen=True, slots=True)
class GPipe(Policy):
    """Forwards first; backwards begin when every forward of the step has run here.

    Bound: m, all microbatches of a step.
    Source: Huang et al., "GPipe", NeurIPS 2019, section 2.3.
    """

    name = "gpipe"
    splits = False
    placements = ("linear",)

    def key(self, task: Task, view: View) -> tuple[int, ...]:
        return (task.kind is not Kind.FORWARD, task.microbatch)

    def admits(self, task: Task, view: View) -> bool:
        if task.kind is Kind.FORWARD:
            return view.in_flight < view.microbatches
        return not view.forwards_left(task)

    def bounds(self, placement: Placement, rank: int, microbatches: int) -> Bounds:
        return Bounds(microbatches, microbatches)
