"""The events that the loop tells its observers. Each overrides the ones that it cares for, and none
may change what happens."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from axrt.scheduler.task import Task
from axrt.transport.control import News


class Wait(NamedTuple):
    """Why a rank does nothing.

    Args:
        what: function that gives a text about what is lacking.
        why: function that gives the cause, one of `scheduler.lacks.CAUSES`.
        owing: function that gives the ranks of the job that owe it.
    """

    what: Callable[[], str]
    why: Callable[[], str]
    owing: Callable[[], Collection[int]]


class Observer:
    """Hears of every event of one rank's loop, at the time it happens; each method does nothing
    here."""

    def entered(self) -> None:
        """The user has called the engine, and the loop begins."""

    def arrived(self, source: int, message: News) -> None:
        """A message has arrived from rank `source`."""

    def sent(self, rank: int, message: News, payload: Any) -> None:
        """A message leaves for rank `rank`, with a payload beside it; the next call sends it."""

    def started(self, task: Task) -> None: ...

    def finished(self, task: Task, began_s: float, ended_s: float) -> None:
        """A task is over. `began_s` and `ended_s` say when it began and ended, in seconds of
        `time.perf_counter`; on a device this call comes later."""

    def waiting(self, wait: Wait) -> None:
        """The rank does nothing until something arrives, or for a moment longer; told again and
        again while that lasts."""

    def resumed(self) -> None:
        """The rank has waited and goes on: something has arrived, or a task starts."""


class Audience:
    """Methods of observers by event, only of those that override it.

    Most observers care for few events, and a microbatch has a dozen.

    Args:
        observers: all observers.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.entered = _who_care(observers, "entered")
        self.arrived = _who_care(observers, "arrived")
        self.sent = _who_care(observers, "sent")
        self.started = _who_care(observers, "started")
        self.finished = _who_care(observers, "finished")
        self.waiting = _who_care(observers, "waiting")
        self.resumed = _who_care(observers, "resumed")


def _who_care(observers: Sequence[Observer], event: str) -> list[Callable[..., None]]:
    told = [getattr(observer, event) for observer in observers]
    return [
        tell for tell in told if getattr(tell, "__func__", None) is not getattr(Observer, event)
    ]
