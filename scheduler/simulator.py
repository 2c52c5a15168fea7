"""What a schedule would do: discrete events that drive the very brains and policies that the runtime runs.

A rank runs one task at a time. Everything that happens at one instant is delivered before any rank picks. A message takes the latency of
its edge. Costs are per rank and microbatch; a chunk costs the v-th part. What varies (jitter, hiccups) is drawn for each stage and kind in
the order of microbatches, so that every policy meets the same durations.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import exp
from random import Random
from typing import NamedTuple

from .message import Meaning, Message
from .order import Order
from .placement import Placement
from .policies.policy import Policy
from .state import RankState
from .task import ONCE_A_STEP, Kind, Task

INPUT, ROOM, END = "input", "room", "end"  # why a rank is idle: nothing has come, a cap, nothing left
_OF = {Kind.FORWARD: "F", Kind.INPUT: "I", Kind.WEIGHT: "W", Kind.BACKWARD: "B"}


@dataclass(frozen=True, slots=True)
class Costs:
    """Durations, in any unit.

    Args:
        forward, input, weight: of a microbatch on all chunks of a rank; a whole backward takes both gradients.
        step: of the optimizer on a bucket.
        task: added to every task, for the loop itself.
        latency: of a message between ranks.
        jitter: sigma of a lognormal factor on every duration; its median is 1.
        hiccups: (share, factor): so many tasks take so much longer.
        stragglers: factor on everything that a rank computes.
        pieces: of a weight gradient.
        seed: of all that varies.
    """

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0
    step: float = 0.0
    task: float = 0.0
    latency: float = 0.0
    jitter: float = 0.0
    hiccups: tuple[float, float] = (0.0, 1.0)
    stragglers: dict[int, float] = field(default_factory=dict)
    pieces: int = 4
    seed: int = 0

    def of_rank(self) -> float:
        """What a microbatch costs on a rank."""
        return self.forward + self.input + self.weight


class Span(NamedTuple):
    """One task on a rank, from its start to its end."""

    rank: int
    task: Task
    start: float
    end: float


class Pause(NamedTuple):
    """A rank with nothing to run, and why when that began."""

    rank: int
    cause: str
    start: float
    end: float


@dataclass(slots=True)
class Timeline:
    """What has run when.

    Args:
        ranks: of the pipeline.
        ideal: what a rank must compute.
        spans: by start.
        pauses: before the last task of a rank.
        in_flight: the most on each rank, in chunks: forward started, backward (or input gradient) not finished.
        held: the same until the weight gradient has finished.
    """

    ranks: int
    ideal: float
    spans: list[Span] = field(default_factory=list)
    pauses: list[Pause] = field(default_factory=list)
    in_flight: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)

    def _computing(self) -> Iterator[Span]:
        return (span for span in self.spans if span.task.kind not in ONCE_A_STEP)

    @property
    def makespan(self) -> float:
        """The end of the last forward or backward."""
        return max(span.end for span in self._computing())

    @property
    def span(self) -> list[float]:
        """For each rank, from its first start to its last end."""
        first, last = [float("inf")] * self.ranks, [0.0] * self.ranks
        for rank, _, start, end in self._computing():
            first[rank], last[rank] = min(first[rank], start), max(last[rank], end)
        return [end - start for start, end in zip(first, last, strict=True)]

    def idle(self, cause: str = "") -> list[float]:
        """For each rank the time without a task until the makespan; of one cause, or of all."""
        total, makespan = [0.0] * self.ranks, self.makespan
        for rank, why, start, end in self.pauses:
            if cause in ("", why):
                total[rank] += min(end, makespan) - start
        return total

    @property
    def utilisation(self) -> float:
        return self.ideal / self.makespan

    @property
    def tasks(self) -> int:
        return sum(1 for _ in self._computing())


class _Durations:
    """How long tasks take, drawn once for each stage, kind and microbatch."""

    def __init__(self, costs: Costs, placement: Placement) -> None:
        self._costs, self._placement = costs, placement
        self._streams: dict[tuple[str, int], Random] = {}
        self._factors: dict[tuple[str, int], float] = {}
        self._base = {"F": costs.forward, "I": costs.input, "W": costs.weight}
        self._varies = costs.jitter > 0 or costs.hiccups[0] > 0

    def of(self, task: Task) -> float:
        if task.kind in ONCE_A_STEP:
            return self._costs.step if task.kind is Kind.STEP else 0.0
        kinds = ("I", "W") if task.kind is Kind.BACKWARD else (_OF[task.kind],)
        scale = self._costs.stragglers.get(self._placement.rank_of(task.stage), 1.0) / self._placement.chunks
        if task.kind is Kind.WEIGHT:
            scale /= self._costs.pieces
        return self._costs.task + scale * sum(self._base[kind] * self._factor(kind, task) for kind in kinds)

    def _factor(self, kind: str, task: Task) -> float:
        if not self._varies:
            return 1.0
        lane = (kind, task.stage)
        if task.kind is not Kind.WEIGHT or task.part == 0:  # pieces share what their task has drawn
            stream = self._streams.get(lane) or self._streams.setdefault(lane, Random(f"{self._costs.seed} {kind} {task.stage}"))
            share, slow = self._costs.hiccups
            factor = exp(self._costs.jitter * stream.gauss(0, 1))
            self._factors[lane] = factor * slow if stream.random() < share else factor
        return self._factors[lane]


class _Simulation:
    """The brains, the clock, and what is under way."""

    def __init__(
        self, placement: Placement, policy: Policy, microbatches: int, costs: Costs, steps: int, clips: bool, evaluate: bool
    ) -> None:
        self._placement, self._costs, self._durations = placement, costs, _Durations(costs, placement)
        self.end = microbatches if evaluate else None
        self.states = [
            RankState(placement, policy, rank, microbatches, clips=clips, trains=not evaluate) for rank in range(placement.ranks)
        ]
        for state in self.states:
            for _ in range(0 if evaluate else steps):
                state.ask_step()
        self.line = Timeline(placement.ranks, microbatches * steps * costs.of_rank())
        self._running: list[Task | None] = [None] * placement.ranks
        self._events: list[tuple[float, int, int, Message | None]] = []  # when, order, rank, what arrives there or None: its task ends
        self._counter = 0
        self._idle_since: list[tuple[float, str] | None] = [None] * placement.ranks
        self._flight, self._hold = [0] * placement.ranks, [0] * placement.ranks
        self.line.in_flight, self.line.held = [0] * placement.ranks, [0] * placement.ranks

    def run(self) -> Timeline:
        touched = set(range(len(self.states)))
        now = 0.0
        while True:
            self._read()
            for rank in sorted(touched):
                if self._running[rank] is None:
                    self._start(rank, now)
            if not self._events:
                break
            now = self._events[0][0]
            touched = set()
            while self._events and self._events[0][0] <= now:
                _, _, rank, message = heapq.heappop(self._events)
                touched |= self._finish(rank, now) if message is None else self._deliver(rank, message)
        stuck = [str(lack) for state in self.states if not state.finished for lack in state.waiting_for()]
        if stuck:
            raise RuntimeError(f"the schedule is stuck: {'; '.join(stuck[:8])}")
        return self.line

    def _read(self) -> None:
        """The reader is never late."""
        first, last = self.states[self._placement.rank_of(0)], self._placement.stages - 1
        while (number := first.microbatch_to_read()) is not None:
            if number == self.end:
                for state in self.states:
                    state.deliver(Message(Meaning.END, next(iter(state.lanes)), number))
                return
            first.deliver(Message(Meaning.ACTIVATION, 0, number))
            self.states[self._placement.rank_of(last)].deliver(Message(Meaning.TARGET, last, number))

    def _start(self, rank: int, now: float) -> None:
        state = self.states[rank]
        task = state.pick()
        if task is None:
            if self._idle_since[rank] is None:
                self._idle_since[rank] = (now, ROOM if state.refuses() else END if state.finished else INPUT)
            return
        self._end_pause(rank, now)
        more = task.kind is Kind.WEIGHT and task.part < self._costs.pieces - 1
        state.start(task, more)
        self._running[rank] = task
        if task.kind is Kind.FORWARD:
            self._count(rank, 1, 1)
        end = now + self._durations.of(task)
        self.line.spans.append(Span(rank, task, now, end))
        self._push(end, rank, None)

    def _finish(self, rank: int, now: float) -> set[int]:
        task, self._running[rank] = self._running[rank], None
        assert task is not None
        touched = {rank}
        messages = self.states[rank].finish(task)
        last_piece = task.kind is not Kind.WEIGHT or task.part == self._costs.pieces - 1
        self._count(rank, -(task.kind in (Kind.BACKWARD, Kind.INPUT)), -(task.kind in (Kind.BACKWARD, Kind.WEIGHT) and last_piece))
        for message in messages:
            to = self._placement.rank_of(message.stage)
            if to == rank or not self._costs.latency:
                touched |= self._deliver(to, message)
            else:
                self._push(now + self._costs.latency, to, message)
        return touched

    def _deliver(self, rank: int, message: Message) -> set[int]:
        self.states[rank].deliver(message)
        return {rank}

    def _count(self, rank: int, in_flight: int, held: int) -> None:
        self._flight[rank] += in_flight
        self._hold[rank] += held
        self.line.in_flight[rank] = max(self.line.in_flight[rank], self._flight[rank])
        self.line.held[rank] = max(self.line.held[rank], self._hold[rank])

    def _end_pause(self, rank: int, now: float) -> None:
        pause, self._idle_since[rank] = self._idle_since[rank], None
        if pause is not None and now > pause[0]:
            self.line.pauses.append(Pause(rank, pause[1], pause[0], now))

    def _push(self, when: float, rank: int, message: Message | None) -> None:
        self._counter += 1
        heapq.heappush(self._events, (when, self._counter, rank, message))


def simulate(
    placement: Placement, policy: Policy, microbatches: int, costs: Costs, *, steps: int = 1, clips: bool = False, evaluate: bool = False
) -> Timeline:
    """Run a schedule on made-up time.

    Args:
        placement, policy: the schedule.
        microbatches: per step.
        costs: how long everything takes.
        steps: one after the other, without a barrier.
        clips: steps wait for a vote on the norm of all gradients.
        evaluate: forwards only, of one step's microbatches.
    Raises:
        RuntimeError: no rank can move and something is left to do; the text names what is missing where.
    """
    simulation = _Simulation(placement, policy, microbatches, costs, steps, clips, evaluate)
    line = simulation.run()
    makespan = line.makespan
    last = [0.0] * placement.ranks
    for span in line.spans:
        last[span.rank] = max(last[span.rank], span.end)
    line.pauses += [Pause(rank, END, end, makespan) for rank, end in enumerate(last) if end < makespan]
    return line


def order_of(policy: Policy, placement: Placement, microbatches: int) -> Order:
    """The order in which a policy runs on a steady machine where forward, input gradient and weight gradient take equally long."""
    rows: list[list[Task]] = [[] for _ in range(placement.ranks)]
    for span in simulate(placement, policy, microbatches, Costs(pieces=1)).spans:
        if span.task.kind not in ONCE_A_STEP:
            rows[span.rank].append(span.task)
    return Order(placement, microbatches, tuple(map(tuple, rows)))
