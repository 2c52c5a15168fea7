"""Anticipation: waiting a moment for what is due before a weight gradient starts that is early
(`RankState.is_early`).

A message that is late by a hair's breadth would else find its receiver in a task that nobody waits
for. The moment is a share of what that task takes, and only where it comes in one piece: a piece of
many is not long in the way. Making the moment shorter after one that was in vain was tried: it
loses more where some are than it saves where all are (docs/journal.md).
"""

from collections.abc import Callable

from .rules import Queue
from .state import RankState
from .task import AnyKind, Task

LINGER = 0.2


class Linger:
    """What a rank starts, as its brain picks it, and when; any unit of time.

    Args:
        share: the moment, as a share of what the weight gradient takes; 0: nobody waits.
    Attributes:
        until: when the rank stops waiting; None where it does not wait.
    """

    def __init__(self, share: float = LINGER) -> None:
        self._share = share
        self.until: float | None = None
        self._took: dict[tuple[AnyKind, int], float] = {}

    def pick(
        self,
        state: RankState,
        queue: Queue,
        now: float,
        has_more: Callable[[Task], bool],
        usual: Callable[[Task], float] | None = None,
    ) -> Task | None:
        """The task of a queue that starts now.

        Args:
            state: the brain of the rank.
            queue: has room for a task.
            now: the time.
            has_more: a task is a piece, and not the last.
            usual: how long a task takes; None: as long as it `took`.
        """
        task = state.pick(queue)
        if task is None or not self._share:
            return task
        if task.kind in state.may_be_early and state.is_early(task, has_more(task)):
            takes = (usual or self._usual)(task)
            if self.defers(now, takes):
                return None
        self.end()
        return task

    def defers(self, now: float, takes: float) -> bool:
        """Something early could start now, and does not yet; it takes so long."""
        if self.until is None:
            self.until = now + self._share * takes
        return now < self.until

    def end(self) -> None:
        """Something starts, or the rank is in another call."""
        self.until = None

    def took(self, task: Task, duration: float) -> None:
        """How long a task of a kind took on a stage. One that was held up counts no more than twice
        the one before."""
        self._took[task.kind, task.stage] = min(
            duration, 2 * self._took.get((task.kind, task.stage), duration)
        )

    def _usual(self, task: Task) -> float:
        return self._took.get((task.kind, task.stage), 0.0)
