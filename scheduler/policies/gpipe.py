"""The rule of GPipe: the step in two halves."""

from dataclasses import dataclass

from ..task import Kind, Task
from .policy import View


@dataclass(frozen=True, slots=True)
class GPipe:
    """Forwards first; backwards begin when every forward of the step has run here.

    Bound: m, all microbatches of a step.
    Source: Huang et al., "GPipe", NeurIPS 2019, section 2.3.
    """

    name = "gpipe"

    def key(self, task: Task, view: View) -> tuple[int, ...]:
        return (task.kind is not Kind.FORWARD, task.microbatch)

    def admits(self, task: Task, view: View) -> bool:
        if task.kind is Kind.FORWARD:
            return view.in_flight < view.microbatches
        return view.forwards_left(task) <= 0

    def stash_bound(self, rank: int, ranks: int, microbatches: int) -> int:
        return microbatches
