"""The tasks that a rank has run, and its messages, with their times, for a timeline."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from axrt.note import News
from axrt.payload import flatten
from axrt.scheduler.message import Message
from axrt.scheduler.task import AnyKind, Task
from axrt.scheduler.timeline import Delivery, Pause, Span

from .observer import Observer, Wait

_READINGS = 32


class Trace(Observer):
    """Keeps the tasks and messages of some steps, and why nothing ran in between.

    Args:
        place: this rank's row in the timeline.
        row_of: function that gives the row of any rank.
        steps: number of steps to keep; the first trained step warms up and is not kept.
    Attributes:
        spans: tasks that have run, with times in seconds.
        pauses: times in which nothing ran.
        messages: messages that this rank has sent or taken, each with the time that it knows.
    """

    def __init__(self, place: int, row_of: Callable[[int], int], steps: int) -> None:
        self._place, self._row_of, self._steps, self._begun = place, row_of, steps, 0
        self._now = _time_of_day()
        self._recording = False
        self._kept = 0, 0, 0
        self._started: dict[Task, float] = {}
        # When the task before has ended, on the device (None) and for each kind that runs beside
        # it: what is started behind a task waits for that.
        self._free: dict[AnyKind | None, float] = defaultdict(float)
        self._idle: tuple[str, float] | None = None
        self.spans: list[Span] = []
        self.pauses: list[Pause] = []
        self.messages: list[Delivery] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context in which a step is trained."""
        self._recording = 0 < self._begun <= self._steps
        self._begun += 1
        self._kept = len(self.spans), len(self.pauses), len(self.messages)
        try:
            yield
        finally:
            self._recording = False
            self._end_pause(self._now())

    def drop_step(self) -> None:
        """Forget the last step, which was not whole: it will be trained again."""
        spans, pauses, messages = self._kept
        del self.spans[spans:], self.pauses[pauses:], self.messages[messages:]
        self._started.clear()
        self._begun -= 1

    @property
    def whole(self) -> bool:
        """True once all steps that are to be kept have been trained."""
        return self._begun > self._steps

    def started(self, task: Task) -> None:
        if self._recording:
            self._started[task] = now = self._now()
            self._end_pause(now)

    def finished(self, task: Task) -> None:
        if task in self._started:
            began, now = self._started.pop(task), self._now()
            queue = task.kind if task.kind.beside else None
            self.spans.append(Span(self._place, task, max(began, self._free[queue]), now))
            self._free[queue] = now

    def sent(self, rank: int, message: News, payload: Any) -> None:
        if self._recording and isinstance(message, Message):
            size = sum(tensor.nbytes for tensor in flatten(payload)[1])
            to, what = self._row_of(rank), str(message)
            self.messages.append(Delivery(self._place, to, what, self._now(), None, size))

    def arrived(self, source: int, message: News) -> None:
        if self._recording and isinstance(message, Message):
            row, what = self._row_of(source), str(message)
            self.messages.append(Delivery(row, self._place, what, None, self._now(), 0))

    def waiting(self, wait: Wait) -> None:
        if self._recording and self._idle is None:
            self._idle = (wait.why(), self._now())

    def _end_pause(self, now: float) -> None:
        if self._idle is not None:
            (cause, since), self._idle = self._idle, None
            self.pauses.append(Pause(self._place, cause, since, now))


def _time_of_day() -> Callable[[], float]:
    """A clock in seconds that the ranks of the job share, as far as their hosts agree on the time.

    It never goes back, and the ranks of a host have the same one: of several readings of two clocks
    the closest pair counts, since a process may lose its core between two readings.
    """
    _, began = min(_offset() for _ in range(_READINGS))
    return lambda: began + time.perf_counter()


def _offset() -> tuple[float, float]:
    """How long it took to read both clocks, and the time of day at which the steady one was 0."""
    before, day, after = time.perf_counter(), time.time(), time.perf_counter()
    return after - before, day - (before + after) / 2
