"""The simulator: discrete events that drive the very brains and policies that the runtime runs."""

# A rank runs one task of a queue at a time, so its copies of offloaded state share the bandwidth of
# their direction one after the other. Everything that happens at one instant is delivered before
# any rank picks. A message with a tensor waits for those before it on the same edge, takes its size
# over the bandwidth, and then, like any message, the latency.

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from ..bucket import Copies, copies_by_pipe
from ..job import Job
from ..lacks import END
from ..linger import Linger
from ..message import Load, Meaning, Message
from ..order import Order
from ..plural import plural
from ..rank_state import RankState
from ..rules import Feature, OnDevice, Queue
from ..sharing import Hand, microbatch_for_slot
from ..task import Task
from .costs import Costs, Edge
from .durations import Durations
from .reader_messages import has_ended, has_read
from .timeline import Pause, Span, Timeline


class StuckError(RuntimeError):
    """No rank can move, and some work is left."""


class _Simulation:
    """The brains, the clock, and the events under way.

    A place is a rank of the job: the ranks of replica 0 come first, then those of replica 1. The
    members of a team come one after the other.
    """

    def __init__(
        self,
        job: Job,
        costs: Costs,
        buckets: int | Sequence[int],
        features: Sequence[Feature] | None,
    ) -> None:
        self._placement, self._costs = job.placement, costs
        self._durations = [Durations(costs, job, pipe) for pipe in range(job.pipes)]
        self.end = None if job.trains else job.microbatches
        copies = [_copies(job, buckets, member) for member in range(job.team)]
        self.states = [
            RankState(
                job,
                rank,
                replica=replica,
                member=member,
                buckets=copies[member],
                features=features,
            )
            for replica in range(job.replicas)
            for rank in range(job.ranks)
            for member in range(job.team)
        ]
        self.line = Timeline(
            len(self.states),
            job.microbatches,
            reductions=job.reductions,
            residencies=job.residencies_a_step,
            team=job.team,
        )
        self._running: set[tuple[int, Queue]] = set()
        self._events: list[
            tuple[float, int, int, Message | Task | None]
        ] = []  # when, order, place; what arrives or ends, or just: look
        self._counter = 0
        self._job = job
        self._places: dict[tuple[int, int], int] = {}  # by pipe and stage
        self._port_free = [0.0] * len(self.states)
        self._edge_free: dict[tuple[int, int], float] = defaultdict(float)
        self._usual = [partial(self._usual_on, state) for state in self.states]
        of_microbatch = costs.of_busiest(job.placement)
        self._lingers = [Linger(costs.linger, of_microbatch) for _ in self.states]
        self._idle_since: list[tuple[float, str] | None] = [None] * len(self.states)
        self._hands: dict[int, list[Hand]] = {}  # of each step

    def run(self, asked: int, barrier: bool) -> Timeline:
        """Run `asked` steps; under a barrier a step begins when all ranks have done the one
        before."""
        now = 0.0
        for calls_left in reversed(range(asked if barrier else 1)):
            for state in self.states:
                for _ in range(0 if self.end is not None else 1 if barrier else asked):
                    state.ask_step()
            now = self._run_all(now, calls_left > 0)
        return self.line

    def _run_all(self, now: float, more: bool) -> float:
        """Run until nothing is under way; where more steps will be asked for, until those asked for
        are done, while copies may go on."""
        touched: Iterable[int] = range(len(self.states))
        while True:
            self._read()
            for place in sorted(touched):
                for queue in self.states[place].queues:
                    if (place, queue) not in self._running:
                        self._start(place, queue, now)
            if not self._events or (more and all(state.finished for state in self.states)):
                break
            now = self._events[0][0]
            moved: set[int] = set()
            while self._events and self._events[0][0] <= now:
                _, _, place, what = heapq.heappop(self._events)
                moved.add(place)
                if isinstance(what, Task):
                    moved |= self._finish(place, what, now)
                elif what is not None:
                    self.states[place].deliver(what)
            touched = moved
        stuck = [
            str(lack)
            for state in self.states
            if not (state.finished and (more or state.settled))
            for lack in state.waiting_for()
        ]
        if stuck:
            raise StuckError(f"the schedule is stuck: {'; '.join(stuck[:8])}")
        return now

    def _read(self) -> None:
        """Readers are never late."""
        team = self._job.team
        a_replica = self._placement.ranks * team
        for first in self.states[self._placement.rank_of(0) * team :: a_replica]:
            while (number := first.microbatch_to_read()) is not None:
                ended = number == self.end
                index = self._microbatch(first.replica, number)
                for pipe in self._job.pipes_of(first.replica, number):
                    self._durations[pipe].numbers[number] = index
                said = (
                    has_ended(self._job, [first.replica], number)
                    if ended
                    else has_read(self._job, first.replica, number)
                )
                for message in said:
                    self.states[self._place_of(message)].deliver(message)

    def _microbatch(self, replica: int, number: int) -> int | None:
        """The running number over all replicas of the microbatch in a replica's slot."""
        job = self._job
        step, within = job.step_of(number)
        index: int | None = replica * job.microbatches + within
        if job.drawn:
            if step not in self._hands:
                self._hands[step] = [Hand.of(job, replica) for replica in range(job.replicas)]
            is_last = job.ends_a_step(number)
            index = microbatch_for_slot(self._hands[step], replica, is_last)
        return None if index is None else step * job.microbatches_in_all + index

    def _start(self, place: int, queue: Queue, now: float) -> None:
        state, linger = self.states[place], self._lingers[place]
        waited_until = linger.until
        task = linger.pick(state, queue, now, self._has_more, self._usual[place])
        if linger.until not in (waited_until, None):
            self._push(linger.until, place, None)
        if task is None:
            if queue is OnDevice.COMPUTE and self._idle_since[place] is None:
                self._idle_since[place] = (now, state.why_idle())
            return
        if queue is OnDevice.COMPUTE and self._idle_since[place] is not None:
            self._end_pause(place, now)
        state.start(task, self._has_more(task))
        self._running.add((place, queue))
        end = now + self._durations[state.pipe_of[task.stage]].of(task)
        self.line.spans.append(Span(place, task, now, end))
        self._push(end, place, task)

    def _usual_on(self, state: RankState, task: Task) -> float:
        return self._durations[state.pipe_of[task.stage]].usual(task)

    def _has_more(self, task: Task) -> bool:
        pieces = self._durations[0].pieces_of(task.kind, task.stage)
        return task.part < pieces - 1

    def _finish(self, place: int, task: Task, now: float) -> set[int]:
        """Finish a task. Returns the places that have heard of it at once."""
        self._running.remove((place, self.states[place].queue_of(task)))
        heard = set()
        for message in self.states[place].finish(task):
            to = self._place_of(message)
            when = self._arrival(place, to, message, now)
            if when <= now:
                self.states[to].deliver(message)
                heard.add(to)
            else:
                self._push(when, to, message)
        return heard

    def _arrival(self, source: int, to: int, message: Message, now: float) -> float:
        if source == to:
            return now
        if message.meaning.load is Load.SLICE:
            # Slices of one member share its way to the others of its team.
            way, slices = (source, -2), self._job.team - 1
            of_stage = self._costs.exchange_of
            exchange = of_stage[message.stage] if of_stage else self._costs.exchange
            free = max(now, self._edge_free[way]) + exchange / slices
            self._edge_free[way] = free
            return free
        leaves = self._port_free[source] = max(now, self._port_free[source]) + self._costs.message
        way, (latency, bandwidth) = self._link(source, to)
        if message.meaning.load is Load.WORD or bandwidth == float("inf"):
            return leaves + latency
        free = self._edge_free[way] = (
            max(leaves, self._edge_free[way]) + self._size(message) / bandwidth
        )
        return free + latency

    def _link(self, source: int, to: int) -> tuple[tuple[int, int], Edge]:
        """The link that a message takes, and the way that it shares with others."""
        costs = self._costs
        node, edge = costs.node or len(self.states), costs.link(source, to)
        if source // node != to // node:
            return (source // node, -3) if costs.between_shared else (source, -1), edge
        return (source // node, -4) if costs.edge_shared else (source, to), edge

    def _size(self, message: Message) -> float:
        if message.meaning.load is Load.SHARD:
            return self._costs.bucket / self._job.pipes_a_group
        if message.meaning.load is Load.PART_OF_SHARD:
            return self._costs.bucket / self._job.pipes
        sender = message.stage - (message.meaning is Meaning.ACTIVATION)
        return self._costs.of_stage(self._placement, sender).sent / self._job.team

    def _place_of(self, message: Message) -> int:
        known = self._places.get((message.pipe, message.stage))
        if known is None:
            replica, place = self._job.place_of(message.pipe, message.stage)
            known = replica * self._placement.ranks * self._job.team + place
            self._places[message.pipe, message.stage] = known
        return known

    def _end_pause(self, place: int, now: float) -> None:
        pause, self._idle_since[place] = self._idle_since[place], None
        if pause is not None and now > pause[0]:
            self.line.pauses.append(Pause(place, pause[1], pause[0], now))

    def _push(self, when: float, place: int, what: Message | Task | None) -> None:
        self._counter += 1
        heapq.heappush(self._events, (when, self._counter, place, what))


def simulate(
    job: Job,
    costs: Costs,
    *,
    steps: int = 1,
    barrier: bool = False,
    buckets: int | Sequence[int] = 1,
    features: Sequence[Feature] | None = None,
) -> Timeline:
    """Run a job on made-up time.

    Args:
        job: a training, or an evaluation of one step's microbatches.
        costs: how long everything takes.
        steps: number of steps to run; of an evaluation 1.
        barrier: True if a step begins only when all ranks have done the one before.
        buckets: number of buckets of every stage, or of each stage, at least 1; each is a task of
            its own wherever work is done on buckets.
        features: functions that make the rows of the table; None: those of the job.
    Returns:
        A timeline with a row for each rank of each replica.
    Raises:
        ValueError: the costs say that a stage recomputes, and the job does not; or the buckets
            are not those of its stages.
        StuckError: no rank can move and some work is left; the text names what each rank lacks.
    """
    if unknown := sorted(costs.recomputed.keys() - job.recomputed.keys()):
        raise ValueError(
            f"the costs of stages {unknown} have a share that is recomputed; expected them in the "
            "job's recomputed too"
        )
    line = _Simulation(job, costs, buckets, features).run(steps, barrier)
    line.ideal = job.drawn_a_step * steps * costs.of_busiest(job.placement)
    line.title = str(job)
    last = [0.0] * line.ranks
    for span in line.on_device():
        last[span.rank] = max(last[span.rank], span.end)
    line.pauses += [
        Pause(place, END, end, line.makespan)
        for place, end in enumerate(last)
        if end < line.makespan
    ]
    return line


def _copies(job: Job, buckets: int | Sequence[int], member: int) -> dict[int, list[Copies]]:
    """The copies of each bucket of a stage, by stage; a team has cut all weights."""
    counts = [buckets] * job.stages if isinstance(buckets, int) else buckets
    if len(counts) != job.stages or min(counts) < 1:
        raise ValueError(
            f"{list(counts)} buckets on {plural(job.stages, 'stage')}; expected a number for each "
            "stage, at least 1"
        )
    return {
        stage: [
            copies_by_pipe(stage, bucket, job.pipes, job.team, member) for bucket in range(count)
        ]
        for stage, count in enumerate(counts)
    }


_EQUAL = Costs(pieces=1)


def order_of(job: Job, costs: Costs = _EQUAL) -> Order:
    """The order in which a job runs on a steady machine.

    Args:
        job: a job of one replica.
        costs: how long everything takes, weight gradients in one piece; by default forward, input
            gradient and weight gradient take equally long.
    Raises:
        StuckError: the schedule is stuck.
    """
    rows: list[list[Task]] = [[] for _ in range(job.ranks)]
    of_members = replace(job, team=1, joints={})  # they all come to their tasks in this order
    for span in simulate(of_members, costs).computing():
        rows[span.rank].append(span.task)
    return Order(job.placement, job.microbatches, tuple(map(tuple, rows)))
