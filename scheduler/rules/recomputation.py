"""Forwards that run again before their backward (activation checkpointing)."""

#   head   needs              then
#   -----  -----------------  -------------------------------
#   R s.n  F s.n has started  nothing; B s.n or I s.n needs it
#
# No policy is asked. R fills time: it comes after forwards and backwards and before weight
# gradients, unless its backward lacks nothing else; then it takes that backward's priority. The
# policy says how many may be ahead of their backwards.

from collections.abc import Iterator

from ..counters import Gate
from ..message import Meaning
from ..policies.policy import View
from ..task import Kind, Task
from .pipeline import whole_weights
from .row import Need, Row, StageHere


def recomputation(here: StageHere) -> Iterator[Row]:
    """The row of a stage that recomputes."""
    back = here.back

    def priority(task: Task, view: View) -> tuple[int, ...]:
        stage, number = task.stage, task.microbatch
        if here.is_last or view.has_come(Meaning.GRADIENT, stage, number):
            return (1, *view.policy.key(Task(back, stage, number), view))
        return (2, number, -stage)

    def admitted(task: Task, view: View) -> bool:
        ahead = view.started(Kind.RECOMPUTE, task.stage) - view.started(back, task.stage)
        return ahead < view.policy.recomputes_ahead

    if here.recomputes:
        needs = (Need(Kind.FORWARD), *whole_weights(here, Gate.RECOMPUTES))
        yield Row(Kind.RECOMPUTE, needs, priority, admitted=admitted, fills=True)
