"""Anticipation: waiting a moment for due work before an early weight gradient starts
(`RankState.is_early`)."""

# A message that is late by a hair's breadth would else find its receiver in a task that nobody
# waits for. The moment is a share of that task's duration, and only where the task comes in one
# piece: a piece of many is not long in the way. A shorter moment after one in vain was tried: it
# loses more where some moments are in vain than it saves where all are, and is worse where latency
# is 0.05 of a forward (1.015).

from collections.abc import Callable

from .rank_state import RankState
from .rules import OnDevice, Queue
from .task import AnyKind, Kind, Task

# As long as the task itself would be in the way: a wait in vain then costs at most what starting
# too early would have. Shorter shares lose a step's end on machines whose messages are late.
LINGER = 1.0
WITH_JOINTS = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT)  # kinds that wait for slices


# Anticipation is the brain's, and its caller passes the time. The transport of the tests has no
# time, so a rank of a test never waits, and a seed stays a history.
class Linger:
    """The choice of the task that a rank starts now, which may be to wait; times are in any one
    unit.

    Args:
        share: longest wait, as a share of the duration of the weight gradient; 0: nobody waits.
        at_joint: longest wait for slices, where other work does not fill that time
            (`Job.fills`); None: as long as the longest task with joints, by what `took` was told
            of its pieces.
    Attributes:
        until: time at which the rank stops waiting; None where it does not wait.
    """

    # Members of a team may have begun different tasks, and each would wait for the other's slices
    # for ever. So no rank waits without an end: behind it other work runs, as where it fills. A
    # member that has begun another task is late by that task, so this is how long it is worth.
    def __init__(self, share: float = LINGER, at_joint: float | None = None) -> None:
        self._share, self._at_joint = share, at_joint
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
            has_more: function that says whether a task is a piece, and not the last.
            usual: function that gives the duration of a task; None: as `took` was told.
        """
        if not state.job.fills and state.is_at_joint(queue):
            piece = state.pick_piece(queue)
            if piece is not None:
                self.end()
                return piece
            if self._waits(now, self._longest_at_joint(state)):
                return None
        task = state.pick(queue)
        if task is None or not self._share or queue is not OnDevice.COMPUTE:
            return task
        if task.kind in state.may_be_early and state.is_early(task, has_more(task)):
            takes = (usual or self._usual)(task)
            if self.defers(now, takes):
                return None
        self.end()
        return task

    def defers(self, now: float, takes: float) -> bool:
        """An early task must still wait."""
        return self._waits(now, self._share * takes)

    def _longest_at_joint(self, state: RankState) -> float:
        if self._at_joint is not None:
            return self._at_joint
        job = state.job
        return max(
            (
                took * (1 + max(job.joints_of(stage)))
                for (kind, stage), took in self._took.items()
                if kind in WITH_JOINTS
            ),
            default=0.0,
        )

    def _waits(self, now: float, longest: float) -> bool:
        if self.until is None:
            self.until = now + longest
        return now < self.until

    def end(self) -> None:
        """Stop waiting: a task starts, or the rank is in another call."""
        self.until = None

    def took(self, task: Task, duration: float) -> None:
        """Note the duration of a task of a kind on a stage. One that was held up counts at most
        twice the one before."""
        self._took[task.kind, task.stage] = min(
            duration, 2 * self._took.get((task.kind, task.stage), duration)
        )

    def _usual(self, task: Task) -> float:
        return self._took.get((task.kind, task.stage), 0.0)
