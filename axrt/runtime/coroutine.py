"""Coroutines: what a rank does beside its tasks, such as writing a checkpoint while it trains."""

# A coroutine is a generator that yields what it waits for. The loop looks at it once a round, and
# lets it go on when that is there. So it is one text from its first line to its last, holds nobody
# up, and the loop's thread alone runs it.

from collections.abc import Callable, Collection, Generator
from typing import Generic, Protocol, TypeVar, cast

from axrt.device.queues import NOW

Result = TypeVar("Result")


class Awaited(Protocol):
    """What a coroutine waits for: the end of work on a queue, or control messages of other
    ranks."""

    def passed(self) -> bool:
        """It is there; asking never waits."""
        ...


Steps = Generator[Awaited, None, Result]


# A save that is written beside training is a coroutine, not rows of the table. Rows were thought
# of: a copy of each bucket behind its step. But a save is asked for by a call between steps, whose
# number no other rank's brain knows, and nothing but the own bucket's step waits for a copy.
class Coroutine(Generic[Result]):
    """A coroutine under way.

    Attributes:
        done: True when it has ended.
    """

    def __init__(self, steps: Steps[Result]) -> None:
        self._steps = steps
        self._awaited: Awaited = NOW
        self._result: Result | None = None
        self.done = False

    def go_on(self) -> None:
        """Do what can be done without waiting; what it raises ends the coroutine."""
        try:
            while not self.done and self._awaited.passed():
                self._awaited = next(self._steps)
        except StopIteration as end:
            self._result, self.done = end.value, True
        except BaseException:
            self.done = True
            raise

    @property
    def owing(self) -> Collection[int]:
        """Ranks whose control messages it waits for."""
        return () if self.done else getattr(self._awaited, "owing", ())

    @property
    def result(self) -> Result:
        """What it has come to, once it is done."""
        assert self.done, "a coroutine is asked for its result before its end"
        return cast("Result", self._result)


Put = Callable[[Callable[[], object]], Awaited]  # on a queue, as `Queue.put`


def at_once(run: Callable[[], object]) -> Awaited:
    """Run a function now, where others put it on a queue."""
    run()
    return NOW


def begin_on(put: Put, act: Callable[[], Result]) -> Steps[Result]:
    """Put a function on a queue now.

    Returns:
        Steps that wait for its end, and come to what it has returned.
    Raises:
        Exception: what it has raised; raised by the steps, and the queue goes on.
    """
    made: list[Result] = []
    faults: list[Exception] = []

    def run() -> None:
        try:
            made.append(act())
        except Exception as fault:  # raised by the steps, for whom it concerns
            faults.append(fault)

    ended = put(run)

    def steps() -> Steps[Result]:
        yield ended
        if faults:
            raise faults[0]
        return made[0]

    return steps()


def run_on(put: Put, act: Callable[[], Result]) -> Steps[Result]:
    """Steps of which the first puts a function on a queue; see `begin_on`."""
    return (yield from begin_on(put, act))
