"""What one rank knows, what it may do next, and what follows when it has done it.

A *lane* is a stage on this rank, kept as a row of counters: microbatches of all steps are numbered on
(n = step * m + k), so "how far" says everything and no task objects or graphs are kept. Within a kind and
a lane, tasks run in order; the *head* of a kind is the first that has not started. A head is ready when
every counter that it needs has passed its number:

    head        needs, on the same lane                                         then
    ----------  --------------------------------------------------------------  -------------------------
    F  s.n      activation n has come; on the last stage target n too;          activation n to stage s+1
                the weights are open (step n // m - 1 was applied)
    B  s.n      F s.n has started; gradient n has come (not on the last stage)  gradient n to stage s-1
    step s.t    B of every microbatch of step t has started                     weights open for step t+1

A need on the same lane or rank is met when its task has *started*: what runs on one device runs in the
order it was started. A message leaves when its task has *finished*. On a CPU the two moments coincide.

`deliver`, `start` and `finish` are the only moves. An illegal one (a message twice, a gradient before its
forward, a step that is neither this one nor the next, a task that is not a ready head) raises
`IllegalMove` with the lane's story and changes nothing.

Two facts bound everything: forwards of step t+1 wait for the stage's own step t, so at most two steps are
alive on a lane; and a policy's cap bounds the forwards in flight, hence every mailbox downstream.
"""

import sys
from dataclasses import dataclass
from enum import Enum

from .message import Meaning, Message
from .placement import Placement
from .policies.policy import Policy
from .task import Kind, Task


class IllegalMove(AssertionError):
    """An event that cannot happen; nothing was changed. The text tells the lane's story."""


class Gate(Enum):
    """What opens forwards besides messages: the weights of the step are in place."""

    WEIGHTS = "weights"

    __hash__ = object.__hash__


Counter = Kind | Meaning | Gate

UNLIMITED = sys.maxsize
_TO_A_LANE = (Meaning.ACTIVATION, Meaning.TARGET, Meaning.GRADIENT)


@dataclass(frozen=True, slots=True)
class Lack:
    """Something that keeps a head from running.

    Args:
        task: the head.
        what: the counter that has not come far enough, or "room" where the policy's cap says no.
        owed_by: the rank that owes it; None where it is this rank's own.
    """

    task: Task
    what: str
    owed_by: int | None

    def __str__(self) -> str:
        return f"{self.task} lacks {self.what}" + ("" if self.owed_by is None else f" from rank {self.owed_by}")


class Lane:
    """One stage on one rank: how far everything has come."""

    __slots__ = ("count", "early", "finished", "needs", "stage")

    def __init__(self, stage: int, last: bool, trains: bool, microbatches: int) -> None:
        self.stage = stage
        self.needs: dict[Kind, tuple[Counter, ...]] = {
            Kind.FORWARD: (Meaning.ACTIVATION, *((Meaning.TARGET,) if last else ()), Gate.WEIGHTS),
            Kind.BACKWARD: (Kind.FORWARD, *(() if last else (Meaning.GRADIENT,))),
            **({Kind.STEP: (Kind.BACKWARD,)} if trains else {}),
        }
        self.count: dict[Counter, int] = dict.fromkeys((*self.needs, *_TO_A_LANE), 0)
        self.count[Gate.WEIGHTS] = microbatches if trains else UNLIMITED
        self.early: dict[Meaning, set[int]] = {meaning: set() for meaning in _TO_A_LANE}
        self.finished: dict[Kind, int] = dict.fromkeys(self.needs, 0)

    def begin_at(self, step: int, microbatches: int) -> None:
        """Set every counter as if the first `step` steps had been done."""
        for counter in self.count:
            self.count[counter] = step * microbatches
        self.count[Gate.WEIGHTS] += microbatches
        self.count[Kind.STEP] = step
        self.finished = {kind: self.count[kind] for kind in self.finished}

    def has(self, meaning: Meaning, microbatch: int) -> bool:
        return microbatch < self.count[meaning] or microbatch in self.early[meaning]

    def arrive(self, meaning: Meaning, microbatch: int) -> None:
        """Messages may overtake each other; the counter is the part that has come without a gap."""
        early = self.early[meaning]
        early.add(microbatch)
        while self.count[meaning] in early:
            early.remove(self.count[meaning])
            self.count[meaning] += 1

    def __str__(self) -> str:
        ran = ", ".join(f"{kind.value} {self.count[kind]} started {self.finished[kind]} finished" for kind in self.needs)
        came = ", ".join(
            f"{meaning.value}s {self.count[meaning]}" + (f" and {sorted(early)}" if early else "") for meaning, early in self.early.items()
        )
        return f"stage {self.stage}: {ran}; came: {came}"


class RankState:
    """The brain of one rank.

    Args:
        placement: which rank holds which stage.
        policy: what runs first, and which may start.
        rank: this rank's place in the pipeline.
        microbatches: per step, at least 1.
        first_step: the step to begin with; its number only, no history is needed.
        trains: False for an evaluation: any number of microbatches, told by the reader's END, no optimizer
            step; backwards carry nothing but keep order, caps and bounds those of training.
    """

    def __init__(
        self, placement: Placement, policy: Policy, rank: int, microbatches: int, *, first_step: int = 0, trains: bool = True
    ) -> None:
        self.placement = placement
        self.policy = policy
        self.rank = rank
        self.ranks = placement.ranks
        self.microbatches = microbatches
        self.trains = trains
        self.asked = first_step * microbatches if trains else UNLIMITED
        self.end: int | None = None
        self.lanes = {stage: Lane(stage, stage == placement.stages - 1, trains, microbatches) for stage in placement.stages_of(rank)}
        if first_step:
            for lane in self.lanes.values():
                lane.begin_at(first_step, microbatches)

    # What a policy may look at (policies.policy.View).

    @property
    def in_flight(self) -> int:
        """Microbatches that hold memory here, over all stages: forward started, backward not.

        A backward that runs still counts for memory, but whatever is started now runs after it on the same
        device; counting it would leave a stream idle between the last backward and the next forward.
        """
        return sum(lane.count[Kind.FORWARD] - lane.count[Kind.BACKWARD] for lane in self.lanes.values())

    def forwards_left(self, task: Task) -> int:
        """How many forwards of the task's step have not started on its lane."""
        end = UNLIMITED if self.end is None else self.end
        return min((task.microbatch // self.microbatches + 1) * self.microbatches, end) - self.lanes[task.stage].count[Kind.FORWARD]

    # Moves.

    def ask_step(self) -> None:
        """The user wants one more step."""
        self.asked += self.microbatches

    @property
    def finished(self) -> bool:
        """Everything asked for is done on this rank."""
        if self.trains:
            return all(lane.finished[Kind.STEP] * self.microbatches >= self.asked for lane in self.lanes.values())
        return self.end is not None and all(lane.finished[Kind.BACKWARD] >= self.end for lane in self.lanes.values())

    @property
    def cut_short(self) -> bool:
        """The reader has ended within a step that was asked for; that step cannot be finished."""
        return self.trains and self.end is not None and self.end < self.asked

    def microbatch_to_read(self) -> int | None:
        """The number that this rank's reader should read now: one ahead of stage 0, within the step that is open there."""
        lane = self.lanes.get(0)
        if lane is None or self.end is not None:
            return None
        read = lane.count[Meaning.ACTIVATION]
        return read if read == lane.count[Kind.FORWARD] and read < min(self.asked, lane.count[Gate.WEIGHTS]) else None

    def deliver(self, message: Message) -> None:
        """Take in what became true elsewhere."""
        if message.meaning is Meaning.END:
            if self.end is not None:
                raise IllegalMove(f"the end was told before: {self.end} microbatches, and now {message.microbatch}")
            self.end = message.microbatch
            return
        self._check_delivery(message)
        self.lanes[message.stage].arrive(message.meaning, message.microbatch)

    def pick(self) -> Task | None:
        """The policy's choice among the heads that may run now. A step comes first: it opens forwards and waits for nobody."""
        heads = [self._head(lane, kind) for lane in self.lanes.values() for kind in lane.needs if self._is_ready(lane, kind)]
        ready = [head for head in heads if self._is_admitted(head)]
        return min(ready, key=self._precedence, default=None)

    def start(self, task: Task) -> None:
        """The task runs from now on; what it makes true on this rank holds at once."""
        lane = self.lanes.get(task.stage)
        if lane is None or task != self._head(lane, task.kind) or not self._is_ready(lane, task.kind):
            raise IllegalMove(f"{task} cannot start: {self._story(task.stage)}")
        lane.count[task.kind] += 1
        if task.kind is Kind.STEP:
            lane.count[Gate.WEIGHTS] += self.microbatches
        for message in self._consequences(task):
            if message.stage in self.lanes:
                self.deliver(message)

    def finish(self, task: Task) -> list[Message]:
        """The task has run; what follows on other ranks."""
        lane = self.lanes.get(task.stage)
        if lane is None or not lane.finished[task.kind] == task.microbatch < lane.count[task.kind]:
            raise IllegalMove(f"{task} cannot finish: {self._story(task.stage)}")
        lane.finished[task.kind] += 1
        return [message for message in self._consequences(task) if message.stage not in self.lanes]

    def waiting_for(self) -> list[Lack]:
        """For every head that was asked for and may not run now: what it lacks, and which rank owes it."""
        wanted = self.asked if self.end is None else min(self.asked, self.end)
        lacks = []
        for lane in self.lanes.values():
            for head in [self._head(lane, kind) for kind in lane.needs]:
                last = self._last_of(head.kind, head.microbatch)
                if last >= wanted:
                    continue
                missing = [counter for counter in lane.needs[head.kind] if lane.count[counter] <= last]
                lacks += [Lack(head, counter.value, self._owner(counter, lane.stage)) for counter in missing]
                if not missing and not self._is_admitted(head):
                    lacks.append(Lack(head, "room", None))
        return lacks

    # Comparisons.

    def _head(self, lane: Lane, kind: Kind) -> Task:
        return Task(kind, lane.stage, lane.count[kind])

    def _last_of(self, kind: Kind, number: int) -> int:
        """The last microbatch that a task concerns: a step needs the backwards of all of its own."""
        return number if kind is not Kind.STEP else (number + 1) * self.microbatches - 1

    def _is_ready(self, lane: Lane, kind: Kind) -> bool:
        """The lane's head of that kind has all it needs."""
        count = lane.count
        last = self._last_of(kind, count[kind])
        for counter in lane.needs[kind]:  # noqa: SIM110 - a generator costs as much as all the comparisons
            if count[counter] <= last:
                return False
        return True

    def _is_admitted(self, head: Task) -> bool:
        return head.kind is Kind.STEP or self.policy.admits(head, self)

    def _precedence(self, task: Task) -> tuple[int, ...]:
        return (0,) if task.kind is Kind.STEP else (1, *self.policy.key(task, self))

    def _consequences(self, task: Task) -> list[Message]:
        if task.kind is Kind.FORWARD and task.stage < self.placement.stages - 1:
            return [Message(Meaning.ACTIVATION, task.stage + 1, task.microbatch)]
        if task.kind is Kind.BACKWARD and task.stage > 0:
            return [Message(Meaning.GRADIENT, task.stage - 1, task.microbatch)]
        return []

    def _owner(self, counter: Counter, stage: int) -> int | None:
        senders: dict[Counter, int] = {Meaning.ACTIVATION: max(stage - 1, 0), Meaning.TARGET: 0, Meaning.GRADIENT: stage + 1}
        rank = self.placement.rank_of(senders.get(counter, stage))
        return None if rank == self.rank else rank

    def _check_delivery(self, message: Message) -> None:
        lane = self.lanes.get(message.stage)
        if lane is None:
            raise IllegalMove(f"{message}: rank {self.rank} holds stages {sorted(self.lanes)}")
        if lane.has(message.meaning, message.microbatch):
            raise IllegalMove(f"{message} has come before: {lane}")
        if message.meaning is Meaning.GRADIENT and message.microbatch >= lane.count[Kind.FORWARD]:
            raise IllegalMove(f"{message} before its forward: {lane}")
        if self.trains and message.microbatch >= lane.count[Gate.WEIGHTS] + self.microbatches:
            raise IllegalMove(f"{message} is of step {message.microbatch // self.microbatches}, neither this one nor the next: {lane}")
        if not self.trains and self.end is not None and message.microbatch >= self.end:
            raise IllegalMove(f"{message}, but there are {self.end} microbatches: {lane}")

    def _story(self, stage: int) -> str:
        return str(self.lanes.get(stage, f"rank {self.rank} holds stages {sorted(self.lanes)}"))
