"""A timeline: which rank has run which task, and when. Simulations and real runs share one
format."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

from ..regular_file import MALFORMED, json_of, read_text
from ..task import AnyKind, Counts, Kind, Task

_MOST = 1e15  # of a time; more is a slip
_MOST_BYTES = 1 << 30  # of a file: a thousand ranks for some steps


class Span(NamedTuple):
    """One task on a rank, from its start to its end."""

    rank: int
    task: Task
    start: float
    end: float


class Pause(NamedTuple):
    """A time in which a rank had nothing to run on its device; `cause` is the reason when it began,
    one of `lacks.CAUSES`."""

    rank: int
    cause: str
    start: float
    end: float


class Delivery(NamedTuple):
    """A message between two ranks, with the times at which it was handed over and taken."""

    # source, to: rows of the two ranks
    source: int
    to: int
    what: str  # the message
    # sent, arrived: the times. Of one rank alone only the one that it knows; the other is None.
    sent: float | None
    arrived: float | None
    num_bytes: int  # size of its tensors

    @property
    def meaning(self) -> str:
        """The first word of the message, such as "activation"."""
        return self.what.partition(" ")[0]

    @property
    def took(self) -> float:
        """How long it was under way; nan where one end is not known."""
        if self.sent is None or self.arrived is None:
            return float("nan")
        return self.arrived - self.sent


def _start(span: Span) -> float:
    return span.start


@dataclass
class Timeline:
    """The tasks that ran on each rank, with their times; not to be changed once one of its figures
    has been asked for.
    """

    ranks: int  # number of rows, one for each rank of each replica
    # number of microbatches of a step and replica; tasks number them on over the steps
    microbatches: int
    # duration of the work that a rank must compute, by which utilisation is measured; 0 where
    # it is not known
    ideal: float = 0.0
    unit: str = ""  # name of the unit of time; "" where there is none
    title: str = ""  # heading for pictures
    # settings of a run: the arguments of `schedules.build_schedule`, and replicas, clips,
    # recompute, slots, host_slots, zero, reductions, gathered and offloads_weights; {} for a
    # simulation
    schedule: dict[str, Any] = field(default_factory=dict)
    reductions: int = 1  # number of times that a step adds a bucket up over its copies
    # number of times that weights of each stage come for a step; () where they stay
    residencies: tuple[int, ...] = ()
    team: int = 1  # number of members that hold each stage, in consecutive rows
    spans: list[Span] = field(default_factory=list)  # tasks that ran, by start
    pauses: list[Pause] = field(default_factory=list)  # times in which a rank could run nothing
    # messages between ranks; () where they were not kept, as in simulations
    messages: list[Delivery] = field(default_factory=list)

    def member(self, rank: int) -> str:
        """Which member of its team a rank is, in words; "" without teams."""
        return f"member {rank % self.team}" if self.team > 1 else ""

    def computing(self) -> Iterator[Span]:
        """The spans of forwards and backwards: all work on microbatches but copies."""
        kinds = (span for span in self.spans if span.task.kind.of_a_microbatch)
        return (span for span in kinds if not span.task.kind.beside)

    def on_device(self) -> Iterator[Span]:
        """The spans of all that occupies the device: not of what runs beside its tasks."""
        return (span for span in self.spans if not span.task.kind.beside)

    @cached_property
    def makespan(self) -> float:
        """The end of the last forward or backward; 0 where there is none."""
        return max((span.end for span in self.computing()), default=0.0)

    @property
    def span(self) -> list[float]:
        """By rank, the time from its first start to its last end."""
        first, last = [float("inf")] * self.ranks, [0.0] * self.ranks
        for rank, _, start, end in self.computing():
            first[rank], last[rank] = min(first[rank], start), max(last[rank], end)
        return [end - start for start, end in zip(first, last, strict=True)]

    def idle(self, cause: str = "") -> list[float]:
        """By rank, the time until the makespan in which its device ran nothing.

        Args:
            cause: one of `lacks.CAUSES`, to count only pauses with that cause; "" counts all idle
                time. In real runs the causes add up to less: the loop's own time between tasks has
                none.
        """
        makespan = self.makespan
        if cause:
            return self._until_makespan(
                (pause.rank, pause.start, pause.end)
                for pause in self.pauses
                if pause.cause == cause
            )
        busy = self._until_makespan((span.rank, span.start, span.end) for span in self.on_device())
        return [makespan - of_rank for of_rank in busy]

    def _until_makespan(self, intervals: Iterable[tuple[int, float, float]]) -> list[float]:
        total = [0.0] * self.ranks
        for rank, start, end in intervals:
            total[rank] += max(0.0, min(end, self.makespan) - max(start, 0.0))
        return total

    @property
    def utilisation(self) -> float:
        """The share of the makespan that the busiest rank computes; 0 where `ideal` is not
        known."""
        return self.ideal / self.makespan

    @property
    def tasks(self) -> int:
        """Number of spans of forwards and backwards; pieces count each."""
        return sum(1 for _ in self.computing())

    # Memory, counted from the spans: a forward adds, and the task that frees it takes away when it
    # ends.

    @property
    def in_flight(self) -> list[int]:
        """By rank, the largest number of chunks in flight: forward started, backward (or input
        gradient) not finished."""
        return [
            int(most)
            for most in self._most(lambda span: self._ends(span, Kind.BACKWARD, Kind.INPUT))
        ]

    @property
    def held(self) -> list[int]:
        """By rank, the largest number of chunks that hold memory: forward started, weight gradient
        not finished."""
        return [int(most) for most in self._most(self.ends_a_backward)]

    @property
    def held_on_device(self) -> list[int]:
        """By rank, the largest number of these chunks whose memory is on the device: not taken
        out, or brought back."""
        now, most = [0] * self.ranks, [0] * self.ranks
        makes = (Kind.FORWARD, Kind.RELOAD)
        events = [
            (span.start, 1, span.rank, 1)
            for span in self.spans
            if span.task.kind in makes and span.task.part == 0
        ] + [
            (span.end, 0, span.rank, -1)
            for span in self.spans
            if span.task.kind is Kind.OFFLOAD or self.ends_a_backward(span)
        ]
        for _, _, rank, change in sorted(events):
            now[rank] += change
            most[rank] = max(most[rank], now[rank])
        return most

    def stash(
        self,
        of_stage: Callable[[int], float],
        recomputed: Callable[[int], float] = lambda stage: 0.0,
    ) -> list[float]:
        """By rank, the most memory that its microbatches hold at one time.

        Args:
            of_stage: function that gives what a microbatch holds on a stage, from its forward on,
                in any unit.
            recomputed: function that gives what it holds in addition once it has been recomputed.
        """
        return self._most(self.ends_a_backward, of_stage, recomputed)

    def ends_a_backward(self, span: Span) -> bool:
        """The span is a backward or a weight gradient, or the last piece of one."""
        return self._ends(span, Kind.BACKWARD, Kind.WEIGHT)

    def _ends(self, span: Span, *kinds: AnyKind) -> bool:
        """The span is the last piece of a task of some kinds."""
        kind, stage, number, part = span.task
        return kind in kinds and part == self._last_pieces[kind, stage, number]

    @cached_property
    def _last_pieces(self) -> dict[tuple[AnyKind, int, int], int]:
        pieces: dict[tuple[AnyKind, int, int], int] = defaultdict(int)
        for _, (kind, stage, number, part), _, _ in self.spans:
            pieces[kind, stage, number] = max(pieces[kind, stage, number], part)
        return pieces

    def _most(
        self,
        frees: Callable[[Span], bool],
        of_stage: Callable[[int], float] = lambda stage: 1.0,
        recomputed: Callable[[int], float] = lambda stage: 0.0,
    ) -> list[float]:
        now, most = [0.0] * self.ranks, [0.0] * self.ranks
        for span in self.computing():
            rank, task = span.rank, span.task
            if task.kind is Kind.FORWARD and task.part == 0:
                now[rank] += of_stage(task.stage)
            if task.kind is Kind.RECOMPUTE and task.part == 0:
                now[rank] += recomputed(task.stage)
            most[rank] = max(most[rank], now[rank])
            if frees(span):
                now[rank] -= of_stage(task.stage) + recomputed(task.stage)
        return most

    def step_of(self, task: Task) -> int:
        """The step that a task belongs to."""
        a_step = {
            Counts.MICROBATCHES: self.microbatches,
            Counts.REDUCTIONS: self.reductions,
            Counts.RESIDENCIES: self.residencies[task.stage] if self.residencies else 1,
        }
        return task.microbatch // a_step.get(task.kind.counts, 1)

    def from_step(self, step: int) -> Self:
        """The same timeline from a step on; time begins with the first task of that step."""
        spans = [span for span in self.spans if self.step_of(span.task) >= step]
        zero = min(span.start for span in spans)
        kept = [Span(rank, task, start - zero, end - zero) for rank, task, start, end in spans]
        pauses = [
            Pause(rank, cause, max(start, zero) - zero, end - zero)
            for rank, cause, start, end in self.pauses
            if end > zero
        ]
        return replace(self, spans=kept, pauses=pauses)

    # Of several ranks, and on disk.

    @classmethod
    def merged(cls, parts: Sequence[Self]) -> Self:
        """The timelines of the ranks of one run as one that begins at 0.

        Its ideal is the work of the busiest rank, recomputation aside.
        """
        zero = min((span.start for part in parts for span in part.spans), default=0.0)
        spans = sorted(
            (
                Span(rank, task, start - zero, end - zero)
                for part in parts
                for rank, task, start, end in part.spans
            ),
            key=_start,
        )
        pauses = [
            Pause(rank, cause, start - zero, end - zero)
            for part in parts
            for rank, cause, start, end in part.pauses
        ]
        messages = _joined([one for part in parts for one in part.messages], zero)
        whole = replace(parts[0], spans=spans, pauses=pauses, messages=messages)
        busy = [0.0] * whole.ranks
        for span in whole.computing():
            busy[span.rank] += (span.end - span.start) * (span.task.kind is not Kind.RECOMPUTE)
        whole.ideal = max(busy)
        return whole

    def to_json(self) -> str:
        """The timeline as one JSON object; spans are [rank, task, start, end], pauses [rank, cause,
        start, end], messages [from, to, message, sent, arrived, bytes]."""
        told = asdict(self) | {
            "spans": [[rank, str(task), start, end] for rank, task, start, end in self.spans],
            "pauses": [list(pause) for pause in self.pauses],
            "messages": [list(one) for one in self.messages],
        }
        return json.dumps(told)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file with the text of `to_json`.

        Raises:
            OSError: it cannot be read.
            ValueError: it has another text.
        """
        return cls.from_json(read_text(path, _MOST_BYTES))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the text of `to_json` back.

        Raises:
            ValueError: the text is no such object; the message says what is wrong.
        """
        try:
            told = json_of(text)
            spans = [
                Span(rank, Task.parse(task), start, end)
                for rank, task, start, end in told.pop("spans")
            ]
            pauses = [Pause(*pause) for pause in told.pop("pauses")]
            # traces of former versions say `stays`
            residencies = tuple(told.pop("residencies", ()) or told.pop("stays", ()))
            messages = [Delivery(*one) for one in told.pop("messages", ())]
            line = cls(
                spans=spans, pauses=pauses, residencies=residencies, messages=messages, **told
            )
            _check(line)
            return line
        except MALFORMED as error:
            raise ValueError(
                f"no timeline: {error}; expected a file of run.trace_steps or of axrt simulate "
                "--timeline"
            ) from None


def _check(line: Timeline) -> None:
    """Check what a damaged file may have: rows that are not there, and times that cannot be.

    Raises:
        ValueError, TypeError: there is such a thing.
    """
    counts = (line.ranks, line.microbatches, line.reductions, line.team, *line.residencies)
    if not all(isinstance(count, int) and count > 0 for count in counts):
        raise ValueError(
            f"numbers {str(counts)[:80]} of ranks, microbatches, reductions, members "
            "and residencies"
        )
    if not isinstance(line.schedule, dict):
        raise ValueError(f"schedule is {line.schedule!r}")
    for rank, what, start, end in (*line.spans, *line.pauses):
        if rank not in range(line.ranks) or not -_MOST < start <= end < _MOST:
            raise ValueError(f"{what} on rank {rank} is from {start} to {end}")
    for one in line.messages:
        known = [time for time in (one.sent, one.arrived) if time is not None]
        places = one.source in range(line.ranks) and one.to in range(line.ranks)
        if not places or not all(-_MOST < time < _MOST for time in known):
            raise ValueError(f"message {one.what} of rank {one.source} to {one.to} at {known}")


def _joined(halves: Sequence[Delivery], zero: float) -> list[Delivery]:
    """Messages whose both ends are known, by the time at which they were sent."""
    sent = {one[:3]: one for one in halves if one.sent is not None}
    whole = []
    for one in halves:
        half = sent.get(one[:3])
        if one.arrived is not None and half is not None and half.sent is not None:
            whole.append(half._replace(sent=half.sent - zero, arrived=one.arrived - zero))
    return sorted(whole, key=lambda one: one.sent or 0.0)
