"""What one rank knows, what it may do next, and what follows when it has done it.

What is known is kept in lanes of counters (see `lane.py`), one for each stage on this rank and one for each bucket of such a
stage. What the head of each kind needs, and what follows from it (t is the step, m its microbatches, S the stages of a pipe,
g the holders of the bucket; all of it within the pipe of which this rank holds the stage, where nothing else is said):

    head            needs                                                              then
    --------------  -----------------------------------------------------------------  --------------------------
    F      s.n      activation n; on the last stage target n too; the weights are      activation n to stage s+1;
                    open (all buckets of s have done step n // m - 1)                  the last stage's last of a step:
                                                                                       a loss to every stage there is
    R      s.n      (a stage that recomputes) F s.n has started
    B, I   s.n      F s.n has started, or R s.n; gradient n (not on the last stage)    gradient n to stage s-1
    W      s.n/i    I s.n has started                                                  the next piece
    B, W   s.n                                                                         the last of a step: a part to each
                                                                                       holder of each shared bucket
    reduce s.t/b    (g > 1 only) a part from each of the g holders                     a sum to each holder
    norm   s.t      (clipped, pipe 0) every bucket of s is whole; all losses           a norm to stage 0
    vote   0.t      (clipped, pipe 0) a norm from each of the S stages                 a vote to every stage there is
    step   s.t/b    bucket b is whole; all losses; if clipped the vote                 weights open for step t+1

R fills time: it comes after forwards and backwards and before weight gradients, unless its backward lacks nothing else, and
only so many are done ahead of their backwards as the policy says.

Under a policy that splits, I and W stand in for B. A W comes in pieces: it stays the head of its lane until the last has
started, and anything may run in between.

A bucket is *whole* when a sum has come from each of its g holders or, where g = 1, when the last B or W of step t has started.
*All losses* are those of every pipe: they say by what the gradient is to be divided, and that all went well. Pipes have
the same gradient when it is whole, so one of them votes for all, and no rank can think otherwise than the others.

A need on the same rank is met when its task has *started*: what runs on one device runs in the order it was
started. A message leaves when its task has *finished*; a loss and a norm do so even to this rank, since the host
needs their values. On a CPU the two moments coincide.

`deliver`, `start` and `finish` are the only moves. An illegal one (a message twice, a gradient before its forward, a step that
is neither this one nor the next, a task that is not a ready head) raises `IllegalMove` with the lane's story
and changes nothing.

Two facts bound everything: forwards of step t+1 wait for the stage's own step t, so at most two steps are alive on
a lane; and a policy's cap bounds the forwards in flight, hence every mailbox downstream.
"""

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from . import message as messages
from . import task as tasks
from .bucket import Holder, Holders, held_by_pipes, to_holders
from .lane import Counter, Gate, Lane, Need
from .message import Meaning, Message
from .placement import Placement
from .policies.policy import Policy
from .task import Kind, Task


class IllegalMove(AssertionError):
    """An event that cannot happen; nothing was changed. The text tells the lane's story."""


UNLIMITED = sys.maxsize
CAUSES = INPUT, ROOM, END = "input", "room", "end"  # why a rank is idle: nothing has come, the policy says no, nothing is left
_A_PIECE: list[Message] = []  # what follows from a piece that is not the last
_FOR_THE_HOST = frozenset({Meaning.LOSS, Meaning.NORM})
_FILLERS = frozenset({Kind.RECOMPUTE, Kind.WEIGHT})  # what nobody waits for
_URGENCY = {Kind.REDUCE: 0, Kind.NORM: 1, Kind.VOTE: 2, Kind.STEP: 3}  # first what others wait for


class Place(NamedTuple):
    """A rank by its coordinates."""

    replica: int
    rank: int

    def __str__(self) -> str:
        return f"rank {self.rank}" + (f" of replica {self.replica}" if self.replica else "")


@dataclass(frozen=True, slots=True)
class Lack:
    """Something that keeps a head from running.

    Args:
        task: the head.
        what: the counter that has not come far enough, or "room" where the policy's cap says no.
        owed_by: who owes it; None where it is this rank itself.
    """

    task: Task
    what: str
    owed_by: Place | None

    def __str__(self) -> str:
        return f"{self.task} lacks {self.what}" + ("" if self.owed_by is None else f" from {self.owed_by}")


def _head(lane: Lane, stage: int, kind: Kind) -> Task:
    return Task(kind, stage, lane.count[kind], lane.piece if kind is Kind.WEIGHT else 0)


class RankState:
    """The brain of one rank.

    Args:
        placement: which rank of a pipeline holds which stage.
        policy: what runs first, and which may start.
        rank: this rank's place in the pipeline.
        microbatches: per step and replica, at least 1.
        replica: of the pipeline, this rank's.
        replicas: how many there are.
        buckets: for each stage of this rank the holders of its buckets, at least one bucket; None: one a stage, held by
            every pipe.
        recomputes: the stages of which a forward runs again before its backward.
        clips: steps wait for a vote on the norm of all gradients.
        first_step: the step to begin with; its number only, no history is needed.
        trains: False for an evaluation: any number of microbatches, told by the reader's END, nothing to step; backwards
            carry nothing but keep order, caps and bounds those of training.
    """

    def __init__(
        self,
        placement: Placement,
        policy: Policy,
        rank: int,
        microbatches: int,
        *,
        replica: int = 0,
        replicas: int = 1,
        buckets: Mapping[int, Sequence[Holders]] | None = None,
        recomputes: Collection[int] = (),
        clips: bool = False,
        first_step: int = 0,
        trains: bool = True,
    ) -> None:
        self.placement = placement
        self.policy = policy
        self.rank = rank
        self.ranks = placement.ranks
        self.microbatches = microbatches
        self.replica = replica
        self.replicas = replicas
        self.pipes = replicas * placement.pipes
        self.clips = clips
        self.trains = trains
        self.asked = first_step * microbatches if trains else UNLIMITED
        self.end: int | None = None
        self._in_flight = self._held = 0  # what the lanes' counters come to
        self._steps_done = first_step if trains else 0
        self._later: dict[Task, list[Message]] = {}  # what follows from a task that runs, once it has finished
        backwards = (Kind.INPUT, Kind.WEIGHT) if policy.splits and trains else (Kind.BACKWARD,)
        self._back, self._last = backwards[0], backwards[-1]  # what sends a gradient back; what completes the weights'
        stages = placement.stages_of(rank)
        self._kinds = {
            stage: (Kind.FORWARD, *((Kind.RECOMPUTE,) * (trains and stage in recomputes)), *backwards)  # in the order of a microbatch
            for stage in stages
        }
        self.pipe_of = {stage: replica * placement.pipes + placement.pipe_of(rank, stage) for stage in stages}
        held = buckets or {stage: (held_by_pipes(stage, 0, self.pipes),) for stage in stages}
        self.holders = {stage: tuple(held[stage]) if trains else () for stage in stages}
        self.lanes = {stage: self._stage_lane(stage) for stage in stages}
        self.buckets = {
            stage: tuple(self._bucket_lane(stage, number, len(holders)) for number, holders in enumerate(self.holders[stage]))
            for stage in stages
        }
        for stage in stages:
            self._link(stage)
        last = placement.stages - 1
        entries = [(pipe, 0, Meaning.ACTIVATION) if pipe == 0 else (pipe, last, Meaning.TARGET) for pipe in range(placement.pipes)]
        # Where this rank sees how far its reader has come: of each pipe either the first or the last stage is here.
        self._read = [(self.lanes[stage], meaning) for pipe, stage, meaning in entries if rank == placement.rank_of(stage, pipe)]
        if first_step:
            self._begin_at(first_step)

    # What a policy may look at (policies.policy.View).

    @property
    def in_flight(self) -> int:
        """Microbatches under way here, over all stages: forward started, backward (or input gradient) not.

        A backward that runs still counts for memory, but whatever is started now runs after it on the same
        device; counting it would leave a stream idle between the last backward and the next forward.
        """
        return self._in_flight

    @property
    def held(self) -> int:
        """Microbatches that hold memory here, over all stages: forward started, weight gradient not."""
        return self._held

    def started(self, kind: Kind, stage: int) -> int:
        """How many of a kind have started on a stage of this rank."""
        return self.lanes[stage].count[kind] // self.placement.pipes

    def in_flight_of(self, stage: int) -> int:
        """Of those in flight, the ones of a stage."""
        return self.started(Kind.FORWARD, stage) - self.started(self._back, stage)

    def forwards_left(self, task: Task) -> bool:
        """Some forwards of the task's step have not started on its lane."""
        end = UNLIMITED if self.end is None else self.end
        return self.lanes[task.stage].count[Kind.FORWARD] < min((task.microbatch // self.microbatches + 1) * self.microbatches, end)

    # Moves.

    def ask_step(self) -> None:
        """The user wants one more step."""
        self.asked += self.microbatches

    @property
    def finished(self) -> bool:
        """Everything asked for is done on this rank."""
        if self.trains:
            return self._steps_done * self.microbatches >= self.asked
        return self.end is not None and all(lane.finished[self._last] >= self.end for lane in self.lanes.values())

    @property
    def cut_short(self) -> bool:
        """A reader has ended within a step that was asked for; that step cannot be finished."""
        return self.trains and self.end is not None and self.end < self.asked

    def microbatch_to_read(self) -> int | None:
        """The number that this rank's reader should read now, within the step that is open at stage 0: one ahead of that stage.

        Of two pipes only one begins here, and the other is never to wait for this one: a whole step is read ahead.
        """
        if self.rank != self.placement.rank_of(0) or self.end is not None:
            return None
        read = min(lane.count[meaning] for lane, meaning in self._read)
        lane, ahead = self.lanes[0], 1 if self.placement.pipes == 1 else self.microbatches
        return read if read < min(lane.count[Kind.FORWARD] + ahead, self.asked, lane.count[Gate.WEIGHTS]) else None

    def is_here(self, message: Message) -> bool:
        """The message is addressed to a stage of this rank."""
        return self.pipe_of.get(message.stage) == message.pipe

    def place_of(self, message: Message) -> Place:
        """Which rank a message is for."""
        return Place(*self.placement.place_of(message.pipe, message.stage))

    def deliver(self, message: Message) -> None:
        """Take in what became true elsewhere."""
        if message.meaning is Meaning.END:
            self._hear_end(message)
            return
        self._addressed(message).arrive(message.meaning, message.number)

    def pick(self) -> Task | None:
        """The policy's choice among the heads that may run now. What ends a step comes first: it waits for nobody, and others for it."""
        heads = [_head(lane, stage, kind) for stage, lane in self.lanes.items() for kind in self._kinds[stage] if lane.is_ready(kind)]
        # What nobody has asked for here may have come: another rank is in its next call, and the user of this one may do something before.
        ready = [head for head in heads if head.microbatch < self.asked and self._admits(head)]
        for stage, lane in self.lanes.items():
            if self.trains and lane.count[self._last] >= lane.count[Gate.WEIGHTS]:  # a step's backwards have all started
                ready += [task for of, task in self._once_a_step(stage) if of.is_ready(task.kind)]
        if len(ready) < 2:
            return ready[0] if ready else None
        return min(ready, key=self._precedence)

    def is_early(self, task: Task, more: bool) -> bool:
        """Of what has been picked: by the policy's plan other things come before it, whose inputs should be here any moment.

        Args:
            task: may start.
            more: it is a piece of a weight gradient, and not the last. A piece is not long in the way, and never early.
        """
        in_pieces = more or task.part > 0
        return task.kind is Kind.WEIGHT and not in_pieces and self.policy.is_early(task, self)

    def why_idle(self) -> str:
        """Why nothing starts where `pick` has found nothing, or something early; one of `CAUSES`."""
        for stage, lane in self.lanes.items():
            for kind in self._kinds[stage]:
                if kind not in _FILLERS and lane.count[kind] < self.asked and lane.is_ready(kind):
                    return ROOM
        return END if self.finished else INPUT

    def start(self, task: Task, more: bool = False) -> list[Message]:
        """The task runs from now on; what it makes true on this rank holds at once, and is returned.

        Args:
            task: a ready head.
            more: it is a piece of a weight gradient, and not the last.
        """
        lane = self._lane_of_task(task)
        if lane is None or task.microbatch != lane.count[task.kind] or not lane.is_ready(task.kind):
            raise IllegalMove(f"{task} cannot start: {self._story(task.stage)}")
        if task.kind is Kind.WEIGHT:
            if task.part != lane.piece:
                raise IllegalMove(f"{task} cannot start: piece {lane.piece} is next; {self._story(task.stage)}")
            lane.piece = lane.piece + 1 if more else 0
            if more:
                self._later[task] = _A_PIECE
                return []
        lane.count[task.kind] += lane.stride[task.kind]
        self._in_flight += (task.kind is Kind.FORWARD) - (task.kind is self._back)
        self._held += (task.kind is Kind.FORWARD) - (task.kind is self._last)
        if task.kind is Kind.STEP:
            steps = min(bucket.count[Kind.STEP] for bucket in self.buckets[task.stage])
            self.lanes[task.stage].count[Gate.WEIGHTS] = (steps + 1) * self.microbatches
        here: list[Message] = []
        later = self._later[task] = []
        for message in self._consequences(task):
            (here if self._is_at_once(message) else later).append(message)
        for message in here:
            self.deliver(message)
        return here

    def finish(self, task: Task) -> list[Message]:
        """The task has run; what follows that was not true at its start: on other ranks, and the losses."""
        lane = self._lane_of_task(task)
        if lane is None or task not in self._later or lane.finished[task.kind] != task.microbatch:
            raise IllegalMove(f"{task} cannot finish: {self._story(task.stage)}")
        later = self._later.pop(task)
        if later is not _A_PIECE:
            lane.finished[task.kind] += lane.stride[task.kind]
        if task.kind is Kind.STEP:
            self._steps_done = min(bucket.finished[Kind.STEP] for buckets in self.buckets.values() for bucket in buckets)
        return later

    def waiting_for(self) -> list[Lack]:
        """For every head that was asked for and may not run now: what it lacks, and who owes it."""
        wanted = self.asked if self.end is None else min(self.asked, self.end)
        lacks: list[Lack] = []
        for stage, lane in self.lanes.items():
            for kind in self._kinds[stage]:
                head = _head(lane, stage, kind)
                if head.microbatch < wanted:
                    lacks += self._lacks(lane, head) or ([] if kind in _FILLERS or self._admits(head) else [Lack(head, "room", None)])
            lacks += [
                lack
                for of, head in self._once_a_step(stage)
                if head.microbatch * self.microbatches < wanted
                for lack in self._lacks(of, head)
            ]
        return lacks

    # Lanes.

    def _stage_lane(self, stage: int) -> Lane:
        m, stages = self.microbatches, self.placement.stages
        pipe = self.pipe_of[stage]
        clips = self.trains and self.clips and pipe == 0
        kinds = (*self._kinds[stage], *((Kind.NORM,) * clips), *((Kind.VOTE,) * (clips and stage == 0)))
        per_step: dict[Counter, int] = {
            **dict.fromkeys((*self._kinds[stage], Meaning.ACTIVATION, Meaning.TARGET, Meaning.GRADIENT, Gate.WEIGHTS), m),
            **dict.fromkeys((Kind.NORM, Kind.VOTE, Meaning.VOTE), 1),
            Meaning.LOSS: self.pipes,
            Meaning.NORM: stages,
        }
        meanings = [counter for counter in per_step if isinstance(counter, Meaning)]
        lane = Lane(f"stage {stage}", per_step, meanings, kinds, pipe % self.placement.pipes, self.placement.pipes)
        lane.count[Gate.WEIGHTS] = m if self.trains else UNLIMITED
        return lane

    def _bucket_lane(self, stage: int, number: int, holders: int) -> Lane:
        kinds = (*((Kind.REDUCE,) * (holders > 1)), Kind.STEP)
        meanings = (Meaning.PART, Meaning.SUM)
        per_step: dict[Counter, int] = {**dict.fromkeys(kinds, 1), **dict.fromkeys(meanings, holders)}
        return Lane(f"stage {stage} bucket {number}", per_step, meanings, kinds)

    def _link(self, stage: int) -> None:
        """What each kind of head on a stage and its buckets needs."""
        lane, last = self.lanes[stage], stage == self.placement.stages - 1
        inputs: list[Counter] = [Meaning.ACTIVATION, *[Meaning.TARGET] * last, Gate.WEIGHTS]
        recomputes = Kind.RECOMPUTE in lane.needs
        back: list[Counter] = [Kind.RECOMPUTE if recomputes else Kind.FORWARD, *[Meaning.GRADIENT] * (not last)]
        if recomputes:
            lane.needs[Kind.RECOMPUTE] = (Need(lane, Kind.FORWARD),)
        lane.needs[Kind.FORWARD] = tuple(Need(lane, counter) for counter in inputs)
        lane.needs[self._back] = tuple(Need(lane, counter) for counter in back)
        if self._last is Kind.WEIGHT:
            lane.needs[Kind.WEIGHT] = (Need(lane, Kind.INPUT),)
        losses, voted = Need(lane, Meaning.LOSS), Need(lane, Meaning.VOTE)
        whole = {
            bucket: Need(bucket, Meaning.SUM) if Kind.REDUCE in bucket.needs else Need(lane, self._last) for bucket in self.buckets[stage]
        }
        for bucket in self.buckets[stage]:
            if Kind.REDUCE in bucket.needs:
                bucket.needs[Kind.REDUCE] = (Need(bucket, Meaning.PART),)
            bucket.needs[Kind.STEP] = (whole[bucket], losses, *((voted,) * self.clips))
        if Kind.NORM in lane.needs:
            lane.needs[Kind.NORM] = (*dict.fromkeys(whole.values()), losses)
        if Kind.VOTE in lane.needs:
            lane.needs[Kind.VOTE] = (Need(lane, Meaning.NORM),)

    def _begin_at(self, step: int) -> None:
        for stage, lane in self.lanes.items():
            lane.begin_at(step)
            for bucket in self.buckets[stage]:
                bucket.begin_at(step)

    def _once_a_step(self, stage: int) -> Iterator[tuple[Lane, Task]]:
        """The heads of what comes once a step, of a stage and its buckets."""
        for number, bucket in enumerate(self.buckets[stage]):
            for kind in bucket.needs:
                yield bucket, Task(kind, stage, bucket.count[kind], number)
        lane = self.lanes[stage]
        for kind in lane.needs:
            if kind in tasks.ONCE_A_STEP:
                yield lane, Task(kind, stage, lane.count[kind])

    def _lane_of(self, message: Message) -> Lane:
        of_a_bucket = message.meaning in messages.OF_A_BUCKET
        return self.buckets[message.stage][message.bucket] if of_a_bucket else self.lanes[message.stage]

    def _lane_of_task(self, task: Task) -> Lane | None:
        if task.kind not in tasks.OF_A_BUCKET:
            lane = self.lanes.get(task.stage)
        else:
            buckets = self.buckets.get(task.stage, ())
            lane = buckets[task.part] if task.part < len(buckets) else None
        return lane if lane is not None and task.kind in lane.needs else None

    def _admits(self, task: Task) -> bool:
        if task.kind is not Kind.RECOMPUTE:
            return self.policy.admits(task, self)
        return self.started(Kind.RECOMPUTE, task.stage) - self.started(self._back, task.stage) < self.policy.recomputes_ahead

    def _precedence(self, task: Task) -> tuple[int, ...]:
        kind, stage, number, part = task
        if kind in tasks.ONCE_A_STEP:
            return (0, _URGENCY[kind], stage, part)
        if kind is Kind.RECOMPUTE:
            lane = self.lanes[stage]
            is_wanted = stage == self.placement.stages - 1 or lane.count[Meaning.GRADIENT] > number
            return (1, *self.policy.key(Task(self._back, stage, number), self)) if is_wanted else (2, number, -stage)
        return (3 if kind is Kind.WEIGHT else 1, *self.policy.key(task, self))  # last: nobody waits for it

    # What follows.

    def _consequences(self, task: Task) -> list[Message]:
        kind, stage, number, part = task
        if kind is Kind.FORWARD:
            if stage < self.placement.stages - 1:
                return [Message(Meaning.ACTIVATION, stage + 1, number, self.pipe_of[stage])]
            return self._losses(number, self.pipe_of[stage])
        if kind is self._back or kind is self._last:
            back = [Message(Meaning.GRADIENT, stage - 1, number, self.pipe_of[stage])] if kind is self._back and stage > 0 else []
            return back + self._parts(stage, number) if kind is self._last and self._ends_a_step(number) else back
        if kind is Kind.REDUCE:
            return self._to_holders(Meaning.SUM, stage, part, number)
        if kind is Kind.NORM:
            return [Message(Meaning.NORM, 0, number * self.placement.stages + stage)]
        if kind is Kind.VOTE:
            return self._to_all(Meaning.VOTE, number)
        return []

    def _is_at_once(self, message: Message) -> bool:
        return message.meaning not in _FOR_THE_HOST and self.is_here(message)

    def _ends_a_step(self, microbatch: int) -> bool:
        """It is its pipe's last."""
        return self.trains and microbatch % self.microbatches + self.placement.pipes >= self.microbatches

    def _losses(self, microbatch: int, pipe: int) -> list[Message]:
        """The last forward of a step: its losses are of interest to every stage of every pipe."""
        if not self._ends_a_step(microbatch):
            return []
        return self._to_all(Meaning.LOSS, microbatch // self.microbatches * self.pipes + pipe)

    def _to_all(self, meaning: Meaning, number: int) -> list[Message]:
        """The same news for every stage of every pipe."""
        return [Message(meaning, stage, number, pipe) for pipe in range(self.pipes) for stage in range(self.placement.stages)]

    def _parts(self, stage: int, microbatch: int) -> list[Message]:
        """The last backward of a step makes this rank's part of every shared bucket whole."""
        step = microbatch // self.microbatches
        shared = [bucket for bucket, holders in enumerate(self.holders[stage]) if len(holders) > 1]
        return [message for bucket in shared for message in self._to_holders(Meaning.PART, stage, bucket, step)]

    def _to_holders(self, meaning: Meaning, stage: int, bucket: int, step: int) -> list[Message]:
        return to_holders(meaning, self.holders[stage][bucket], Holder(self.pipe_of[stage], stage, bucket), step)

    # Refusals.

    def _lacks(self, lane: Lane, head: Task) -> list[Lack]:
        return [Lack(head, need.counter.value, self._owner(need, head)) for need in lane.missing(head.kind)]

    def _owner(self, need: Need, head: Task) -> Place | None:
        """Who owes the next of what a head needs."""
        pipe, stage, next_number = self.pipe_of[head.stage], head.stage, need.lane.count[need.counter]
        reader = self.replica * self.placement.pipes, 0
        if need.counter in (Meaning.PART, Meaning.SUM):
            holders = next(held for lane, held in zip(self.buckets[stage], self.holders[stage], strict=True) if lane is need.lane)
            pipe, stage, _ = holders[next_number % len(holders)]
        elif need.counter is Meaning.LOSS:
            pipe, stage = next_number % self.pipes, self.placement.stages - 1
        elif need.counter is Meaning.NORM:
            stage = next_number % self.placement.stages
        elif need.counter is Meaning.VOTE:
            pipe, stage = 0, 0
        elif need.counter is Meaning.TARGET:
            pipe, stage = reader
        elif need.counter is Meaning.ACTIVATION:
            pipe, stage = (pipe, stage - 1) if stage > 0 else reader
        elif need.counter is Meaning.GRADIENT:
            stage += 1
        place = Place(*self.placement.place_of(pipe, stage))
        return None if place == (self.replica, self.rank) else place

    def _hear_end(self, message: Message) -> None:
        """Training ends where the first reader ends; an evaluation's replicas end each for itself."""
        if self.end is not None and (not self.trains or message.number // self.microbatches != self.end // self.microbatches):
            raise IllegalMove(f"the end was told before: {self.end} microbatches, and now {message.number}")
        self.end = message.number if self.end is None else min(self.end, message.number)

    def _addressed(self, message: Message) -> Lane:
        """The lane that the message is for; refused where it cannot be true."""
        if not self.is_here(message) or message.bucket >= max(1, len(self.buckets[message.stage])):
            raise IllegalMove(f"{message}: {Place(self.replica, self.rank)} holds stages {sorted(self.lanes)}")
        of_stage, lane = self.lanes[message.stage], self._lane_of(message)
        if lane.has(message.meaning, message.number):
            raise IllegalMove(f"{message} has come before: {lane}")
        if (message.number - lane.count[message.meaning]) % lane.stride[message.meaning]:
            raise IllegalMove(f"{message} is of another pipe: {lane}")
        if message.meaning is Meaning.GRADIENT and message.number >= of_stage.count[Kind.FORWARD]:
            raise IllegalMove(f"{message} before its forward: {lane}")
        step = message.number // lane.per_step[message.meaning]
        if self.trains and step > of_stage.count[Gate.WEIGHTS] // self.microbatches:
            raise IllegalMove(f"{message} is of step {step}, neither this one nor the next: {lane}")
        if not self.trains and self.end is not None and message.number >= self.end:
            raise IllegalMove(f"{message}, but there are {self.end} microbatches: {lane}")
        return lane

    def _story(self, stage: int) -> str:
        if stage not in self.lanes:
            return f"rank {self.rank} holds stages {sorted(self.lanes)}"
        return "; ".join(str(lane) for lane in (self.lanes[stage], *self.buckets[stage]))
