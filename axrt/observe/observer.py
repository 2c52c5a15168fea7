"""What the loop tells its observers; each overrides what it cares for, and none may change what
happens."""

from collections.abc import Callable, Sequence

from axrt.note import News
from axrt.scheduler.task import Task


class Observer:
    """Hears of every event of one rank's loop, at the time it happens."""

    def entered(self) -> None:
        """The user has called, and the loop begins."""

    def arrived(self, source: int, message: News) -> None:
        """A message from another rank."""

    def sent(self, rank: int, message: News) -> None:
        """A message to another rank."""

    def started(self, task: Task) -> None: ...
    def finished(self, task: Task) -> None: ...
    def waiting(self, what: Callable[[], str], why: Callable[[], str]) -> None:
        """Nothing is done until something arrives, or for a moment longer; told again and again
        while that lasts.

        Args:
            what: says what is lacking.
            why: the cause, one of `scheduler.state.CAUSES`.
        """


class Audience:
    """Observers by event: only those that care for it. Most care for few, and a microbatch has a
    dozen.

    Args:
        observers: all of them.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.entered = _who_care(observers, "entered")
        self.arrived = _who_care(observers, "arrived")
        self.sent = _who_care(observers, "sent")
        self.started = _who_care(observers, "started")
        self.finished = _who_care(observers, "finished")
        self.waiting = _who_care(observers, "waiting")


def _who_care(observers: Sequence[Observer], event: str) -> list[Callable[..., None]]:
    told = [getattr(observer, event) for observer in observers]
    return [
        tell for tell in told if getattr(tell, "__func__", None) is not getattr(Observer, event)
    ]
