"""The tasks that a rank has run, and its messages, with their times, for a timeline."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from axrt.scheduler.message import Message
from axrt.scheduler.simulation.timeline import Delivery, Pause, Span
from axrt.scheduler.task import Task
from axrt.transport.control import News
from axrt.transport.payload import flatten

from .observer import Observer, Wait

_READINGS = 32


class Trace(Observer):
    """Keeps the tasks and messages of some steps, and why nothing ran in between.

    Args:
        row_of: function that gives the row of any rank.
        steps: number of steps to keep; the first trained step warms up and is not kept.
    Attributes:
        spans: tasks that have run, with times in seconds.
        pauses: times in which nothing ran.
        messages: messages that this rank has sent or taken, each with the time that it knows.
    """

    def __init__(self, place: int, row_of: Callable[[int], int], steps: int) -> None:
        self._place, self._row_of, self._steps, self._begun = place, row_of, steps, 0
        self._zero = _time_of_day_at_zero()
        self._recording = False
        self._kept = 0, 0, 0
        self._running: set[Task] = set()
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
        self._running.clear()
        self._begun -= 1

    @property
    def whole(self) -> bool:
        """True once all steps that are to be kept have been trained."""
        return self._begun > self._steps

    def started(self, task: Task) -> None:
        if self._recording:
            self._running.add(task)
            self._end_pause(self._now())

    def finished(self, task: Task, began_s: float, ended_s: float) -> None:
        if task in self._running:
            self._running.remove(task)
            began, ended = self._zero + began_s, self._zero + ended_s
            self.spans.append(Span(self._place, task, began, ended))

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

    def _now(self) -> float:
        """Seconds that the ranks of the job share."""
        return self._zero + time.perf_counter()

    def _end_pause(self, now: float) -> None:
        if self._idle is not None:
            (cause, since), self._idle = self._idle, None
            self.pauses.append(Pause(self._place, cause, since, now))


def _time_of_day_at_zero() -> float:
    """The time of day at which the steady clock was 0, in seconds: what makes it a clock that the
    ranks of the job share, as far as their hosts agree on the time.

    The ranks of a host have the same one: of several readings of two clocks the closest pair
    counts, since a process may lose its core between two readings.
    """
    return min(_offset() for _ in range(_READINGS))[1]


def _offset() -> tuple[float, float]:
    """How long it took to read both clocks, and the time of day at which the steady one was 0."""
    before, day, after = time.perf_counter(), time.time(), time.perf_counter()
    return after - before, day - (before + after) / 2
