"""A lane is a row of counters: how far everything has come, of a stage on this rank or of a bucket of that stage.

Microbatches of all steps are numbered on (n = step * m + k), so "how far" says everything, and no task objects or
graphs are kept. A lane of one pipe of several counts that pipe's microbatches only, which are as many apart as there are pipes. Within a
kind and a lane tasks run in order; the *head* of a kind is the first that has not started. It is ready when every counter that it needs
has passed its number.
"""

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from .message import Meaning
from .task import ONCE_A_STEP, Kind

_OF_MICROBATCHES = (frozenset(Kind) - ONCE_A_STEP) | {Meaning.ACTIVATION, Meaning.TARGET, Meaning.GRADIENT}


class Gate(Enum):
    """What opens forwards besides messages: the weights of the step are in place."""

    WEIGHTS = "weights"

    __hash__ = object.__hash__


Counter = Kind | Meaning | Gate


class Need(NamedTuple):
    """A counter that a head waits for, and the lane that keeps it."""

    lane: "Lane"
    counter: Counter


class Lane:
    """One row of counters.

    Args:
        name: for the story.
        per_step: how many of each make a step.
        meanings: what messages may say to it.
        kinds: the tasks that run on it.
        pipe, pipes: which one of how many it belongs to, in its replica.
    """

    __slots__ = ("count", "early", "finished", "name", "needs", "per_step", "piece", "stride")

    def __init__(
        self,
        name: str,
        per_step: Mapping[Counter, int],
        meanings: Sequence[Meaning],
        kinds: Sequence[Kind],
        pipe: int = 0,
        pipes: int = 1,
    ) -> None:
        self.name = name
        self.per_step = per_step
        self.needs: dict[Kind, tuple[Need, ...]] = dict.fromkeys(kinds, ())
        counters: tuple[Counter, ...] = (*kinds, *meanings)
        self.count = {counter: pipe if counter in _OF_MICROBATCHES else 0 for counter in counters}
        self.stride = {counter: pipes if counter in _OF_MICROBATCHES else 1 for counter in counters}
        self.early: dict[Meaning, set[int]] = {meaning: set() for meaning in meanings}
        self.finished: dict[Kind, int] = {kind: self.count[kind] for kind in kinds}
        self.piece = 0  # of the weight gradient at the head, which is begun where it is not 0

    def begin_at(self, step: int) -> None:
        """Set every counter as if the first `step` steps had been done."""
        for counter in self.count:
            self.count[counter] += step * self.per_step[counter]
        self.finished = {kind: self.count[kind] for kind in self.finished}

    def has(self, meaning: Meaning, number: int) -> bool:
        return number < self.count[meaning] or number in self.early[meaning]

    def arrive(self, meaning: Meaning, number: int) -> None:
        """Messages may overtake each other; the counter is the part that has come without a gap."""
        early = self.early[meaning]
        if number > self.count[meaning]:
            early.add(number)
            return
        self.count[meaning] += self.stride[meaning]
        while self.count[meaning] in early:
            early.remove(self.count[meaning])
            self.count[meaning] += self.stride[meaning]

    def missing(self, kind: Kind) -> Iterator[Need]:
        """What the head of a kind still needs."""
        head = self.count[kind]
        for need in self.needs[kind]:
            if need.lane.count[need.counter] < _past(kind, head, need):
                yield need

    def is_ready(self, kind: Kind) -> bool:
        """The head of a kind has all it needs."""
        if kind in ONCE_A_STEP:
            return not any(self.missing(kind))
        head = self.count[kind]
        for lane, counter in self.needs[kind]:  # noqa: SIM110 - a generator costs as much as all the comparisons
            if lane.count[counter] <= head:
                return False
        return True

    def __str__(self) -> str:
        ran = [f"{kind.value} {self.count[kind]} started {self.finished[kind]} finished" for kind in self.finished]
        came = [
            f"{meaning.value}s {self.count[meaning]}" + (f" and {sorted(early)}" if early else "") for meaning, early in self.early.items()
        ]
        return f"{self.name}: {', '.join(ran)}; came: {', '.join(came)}"


def _past(kind: Kind, head: int, need: Need) -> int:
    """How far a head needs the counter: past its own microbatch, or past all that belong to its step."""
    return (head + 1) * need.lane.per_step[need.counter] if kind in ONCE_A_STEP else head + 1
