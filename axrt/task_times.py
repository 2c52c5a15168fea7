"""What the tasks of a rank take, beside a training that goes on."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import log
from statistics import median
from typing import Any, NamedTuple

from axrt.note import News
from axrt.observe.observer import Observer
from axrt.payload import flatten
from axrt.scheduler.message import Meaning, Message
from axrt.scheduler.task import AnyKind, Kind, Task

_KINDS = (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT)
_SHORTEST_S = 1e-9  # of a forward, whose logarithm is taken


class StageTimes(NamedTuple):
    """What a microbatch took on a stage, in the last steps.

    Args:
        forward, input, weight: median seconds of a forward and of an input gradient, and mean
            seconds of all pieces of a weight gradient.
        sent: bytes of the activation that it sends to another rank; 0 if it sends none.
        spread: standard deviation of the logarithm of the forward's duration, where all but the
            longest and the shortest sixths are looked at: the first forwards of a run are slow.
        pieces: mean number of pieces of a weight gradient.
    """

    forward: float
    input: float
    weight: float
    sent: float
    spread: float
    pieces: float


def _spread(took: Sequence[float]) -> float:
    logs = sorted(log(max(_SHORTEST_S, one)) for one in took)
    aside = len(logs) // 6  # a sixth on each side of a normal distribution is beyond its deviation
    return (logs[-1 - aside] - logs[aside]) / 2


class TaskTimes(Observer):
    """What the forwards, input gradients and weight gradients of this rank's stages take."""

    def __init__(self) -> None:
        self._counts = True
        self._running: set[Task] = set()
        self._took: dict[tuple[int, AnyKind], list[float]] = defaultdict(list)
        self._sent: dict[int, float] = {}

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Context in which nothing counts: forwards of an evaluation keep nothing, and are
        shorter."""
        self._counts = False
        try:
            yield
        finally:
            self._counts = True

    def started(self, task: Task) -> None:
        if self._counts and task.kind in _KINDS:
            self._running.add(task)

    def finished(self, task: Task, began_s: float, ended_s: float) -> None:
        if task in self._running:
            self._running.remove(task)
            self._took[task.stage, task.kind].append(ended_s - began_s)

    def sent(self, rank: int, message: News, payload: Any) -> None:
        is_one = isinstance(message, Message) and message.meaning is Meaning.ACTIVATION
        if is_one and self._counts:
            assert isinstance(message, Message)
            stage = message.stage - 1
            if stage not in self._sent:
                self._sent[stage] = sum(tensor.nbytes for tensor in flatten(payload)[1])

    def take(self) -> dict[int, StageTimes]:
        """What a microbatch took on each stage since the last call."""
        found = {}
        for stage in {stage for stage, _ in self._took}:
            forward, back, pieces = (self._took[stage, kind] for kind in _KINDS)
            if forward and back:
                found[stage] = StageTimes(
                    median(forward),
                    median(back),
                    sum(pieces) / len(back),
                    self._sent.get(stage, 0.0),
                    _spread(forward),
                    len(pieces) / len(back),
                )
        self._took.clear()
        self._sent.clear()
        self._running.clear()
        return found
