"""Times optimizer steps: from the first copy or task for a step on a rank to the last one's
end."""

import statistics
import time
from collections import deque

from axrt.scheduler.task import AnyKind, Kind, Task

from .observer import Observer

_OF_A_STEP: frozenset[AnyKind] = frozenset(
    (
        *(Kind.FETCH, Kind.STEP, Kind.STORE, Kind.REFETCH, Kind.COMMIT, Kind.RESTORE),
        *(Kind.SCALE, Kind.UNLOAD, Kind.HOST_STEP, Kind.LOAD),
    )
)
_KEPT = 100  # steps


class StepTime(Observer):
    """Keeps the time of the last steps; the first one, which makes moments, is left out."""

    def __init__(self) -> None:
        self._began: dict[int, float] = {}
        self._ended: dict[int, float] = {}
        self._taken: deque[float] = deque(maxlen=_KEPT)
        self._last = 0

    def started(self, task: Task) -> None:
        if task.kind in _OF_A_STEP and task.microbatch not in self._began:
            self._began[task.microbatch] = time.perf_counter()
            self._keep(task.microbatch - 2)

    def finished(self, task: Task, began_s: float, ended_s: float) -> None:
        if task.kind in _OF_A_STEP:
            # Tasks of several queues are told of in another order than that of their ends.
            before_s = self._ended.get(task.microbatch, ended_s)
            self._ended[task.microbatch] = max(before_s, ended_s)

    @property
    def seconds(self) -> list[float]:
        """The time of each step that has ended, the newest last."""
        for step in sorted(self._began):
            self._keep(step)
        return list(self._taken)

    @property
    def median_s(self) -> float | None:
        """The median; None where no step but the first has ended."""
        seconds = self.seconds
        return statistics.median(seconds) if seconds else None

    def _keep(self, step: int) -> None:
        """Keep the time of a step that has ended, since a later one goes on."""
        began, ended = self._began.pop(step, None), self._ended.pop(step, None)
        if began is not None and ended is not None and step > 0:
            self._taken.append(ended - began)
