"""The state of one rank: what it knows, what it may do next, and what follows from that.

The table of work (`rules`) says of every kind what its head needs, whose turn it is, and which
messages follow. Here rows are counted, picked and refused, every kind alike. All knowledge is kept
in lanes of counters (`lane.py`), one for each stage on this rank and one for each bucket of such a
stage.

A need on the same rank and queue is met when its task has *started*: tasks of one queue run in the
order in which they were started. Between queues a need is met when the task has *finished*, and a
message to another rank is true then. News for the host wait for the end even on their own rank,
since the host needs their values. On a CPU with one queue the two moments coincide.

Work that may come in pieces says whether it was one when it has run. Where that is not at its start
it is told later (`tell`), and its kind has no head until then.

`deliver`, `start`, `tell` and `finish` are the only moves. An illegal one raises `IllegalMove` with
the lane's story and changes nothing. Examples are a message that comes twice, a gradient before its
forward, a step that is neither this one nor the next, a task that is not a ready head. A loop that
starts what `pick` gives makes no illegal start, so that of a run does without those two checks.

Two facts bound everything: forwards of step t+1 wait for the stage's own step t, so at most two
steps are alive on a lane; and a policy's cap bounds the forwards in flight, hence every mailbox
downstream.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .bucket import Copies, copies_by_pipe
from .job import Job, Seat
from .lane import Counter, Gate, Lane
from .message import Meaning, Message
from .plural import plural
from .rules import Feature, OnDevice, Pool, Queue, Row, features_of
from .rules.collectives import groups_of
from .rules.row import always
from .stash import StashMove, StashRooms
from .stays import READERS
from .table import UNLIMITED, Entry, Table
from .task import AnyKind, Kind, Task
from .turns import turns_of


class IllegalMove(AssertionError):
    """An event that cannot happen. Nothing was changed, and the text tells the lane's story."""


# Why a rank is idle: nothing has come, the policy says no, state is on its way, nothing is left.
CAUSES = INPUT, ROOM, COPIES, END = "input", "room", "copies", "end"


_WHOLE_WEIGHTS = (Gate.FORWARDS, Gate.RECOMPUTES, Gate.BACKWARDS)  # where they come for a stay
_ON_HOST = (Kind.UNLOAD, Kind.HOST_STEP, Kind.LOAD)  # a step on the host, and the ways there


class Coordinates(NamedTuple):
    """The replica of a rank, and its index within the pipeline."""

    replica: int
    rank: int

    def __str__(self) -> str:
        return f"rank {self.rank}" + (f" of replica {self.replica}" if self.replica else "")


@dataclass(frozen=True, slots=True)
class Lack:
    """Something that keeps a head from running."""

    task: Task  # the head that cannot run
    # name of the counter that has not come far enough, or "room" where the policy's cap refuses
    what: str
    # rank that owes the next of what is counted; None for this rank itself
    owed_by: Coordinates | None

    def __str__(self) -> str:
        owner = "" if self.owed_by is None else f" from {self.owed_by}"
        return f"{self.task} lacks {self.what}{owner}"


class RankState:
    """The brain of one rank.

    Args:
        rank: index of this rank in its pipeline, 0 <= rank < job.ranks.
        replica: index of the replica that this rank belongs to, 0 <= replica < job.replicas.
        buckets: copies of each bucket of a stage, by stage of this rank, at least one bucket a
            stage; None: one bucket a stage, held by every pipe.
        first_step: number of the step to begin with, at least 0; no history is needed.
        features: functions that make the rows of the table; None: those of the job.
        checks: True to refuse starts and ends that cannot be. A loop that starts what `pick` has
            given can make none, and may do without; messages are always checked, since they come
            from elsewhere.
    Attributes:
        in_flight: number of microbatches under way here, over all stages: forward started, backward
            (or input gradient) not. A backward that runs still counts for memory, but work that is
            started now runs after it on the same device. Counting it would leave a stream idle
            between the last backward and the next forward.
        held: number of microbatches that hold memory here, over all stages: forward started, weight
            gradient not.
        memo: what policies have worked out from what has started here; empty after each start.
        reached: what policies keep of how far a plan has come.
        reads: this rank's reader reads the microbatches of its replica.
        queues: queues on which some work of this rank runs.
        beside: those of them besides that of the device's tasks.
        may_be_early: kinds of work whose heads may be early.
        asked: number of microbatches that are wanted, counted from the first step of the run.
        end: number of microbatches there are, once a reader has said so; None before.
    """

    def __init__(
        self,
        job: Job,
        rank: int,
        *,
        replica: int = 0,
        buckets: Mapping[int, Sequence[Copies]] | None = None,
        first_step: int = 0,
        features: Sequence[Feature] | None = None,
        checks: bool = True,
    ) -> None:
        self._checks = checks
        self.job, self.rank, self.replica = job, rank, replica
        self.policy, self.placement = job.policy, job.placement
        self.ranks, self.microbatches = job.ranks, job.microbatches
        self.asked = first_step * job.microbatches if job.trains else UNLIMITED
        self.end: int | None = None
        stages = self.placement.stages_of(rank)
        self.in_flight = self.held = 0  # what the lanes' counters come to
        self.reads = rank == self.placement.rank_of(0)
        self._marks = job.marks()
        self.memo: dict[Any, Any] = {}
        self.reached: dict[Any, int] = {}
        self._steps_done = first_step
        self._free = {
            Pool.SLOTS: job.slots,
            Pool.ON_HOST: job.host_rooms,
            Pool.ROOMS: job.stays.room if job.stays else 0,
        }
        offloads_stash = job.offloads_stash(rank)
        self._stash = StashRooms(job.held_on_device, stages) if offloads_stash else None
        # The stages of this rank in the order in which stays begin, and how many have begun.
        self._order_of_stays = job.stays.order[rank] if job.stays else ()
        self._stays_begun = 0
        # What runs, in the order of its start: its row, the messages that follow once it has
        # finished, and whether more pieces of it come.
        self._running: dict[Task, tuple[Entry, list[Message], bool]] = {}
        # The kinds and stages whose head runs and has not been told to be a piece or the whole.
        self._untold: dict[tuple[AnyKind, int], Task] = {}
        # The buckets of a stage that pieces of the task at its head have completed.
        self._completed: dict[int, set[int]] = {stage: set() for stage in stages}
        self.pipe_of = {stage: job.pipe_of(replica, rank, stage) for stage in stages}
        buckets = buckets or {
            stage: (copies_by_pipe(stage, 0, job.pipes),) for stage in self.pipe_of
        }
        mine = {stage: buckets[stage] for stage in stages}
        self._groups = groups_of(job, mine)
        self._turns = turns_of(self._groups, first_step)
        self._table = Table(
            job,
            [Seat(pipe, stage) for stage, pipe in self.pipe_of.items()],
            buckets,
            features or features_of(job),
        )
        self._lanes, self.queues = self._table.lanes, self._table.queues
        self._entry_of = self._table.entry_of
        # Those of messages that wake no work of once a step; an evaluation has an end instead of
        # steps, and checks every message against it.
        self._inboxes = {
            address: inbox
            for address, inbox in self._table.inboxes.items()
            if job.trains and address[0] not in self._table.wakers
        }
        self._has_one_queue = len(self.queues) == 1
        self.beside = [queue for queue in self.queues if queue is not OnDevice.COMPUTE]
        self.may_be_early = self._table.early
        self._look_again()
        self._entries = list(self._entered())
        for lane in self._table.all_lanes():
            lane.begin_at(first_step)

    def _entered(self) -> Iterator[tuple[Lane, Meaning]]:
        """For each pipe whose first or last stage is here, the lane and meaning by which this rank
        sees how far its reader has come."""
        last = self.job.last_stage
        for pipe in range(self.placement.pipes):
            stage, meaning = (0, Meaning.ACTIVATION) if pipe == 0 else (last, Meaning.TARGET)
            if self.rank == self.placement.rank_of(stage, pipe):
                yield self._lanes[stage], meaning

    # The view of a policy (policies.policy.View).

    def started(self, kind: AnyKind, stage: int) -> int:
        """Number of tasks of a kind that have started on a stage of this rank."""
        return self._lanes[stage].count[kind] // self.placement.pipes

    # In flight ends at the start of a backward, so that a stream takes the next forward behind it.
    def in_flight_of(self, stage: int) -> int:
        """Number of microbatches in flight on one stage of this rank."""
        back = Kind.INPUT if self.job.splits else Kind.BACKWARD
        return self.started(Kind.FORWARD, stage) - self.started(back, stage)

    def forwards_left(self, task: Task) -> bool:
        """Some forwards of the task's step have not started on the task's stage."""
        started = self._lanes[task.stage].count[Kind.FORWARD]
        if self.end is not None and started >= self.end:
            return False
        step = task.microbatch // self.microbatches
        return started < (step + 1) * self.microbatches

    @property
    def held_on_device(self) -> int:
        """Number of microbatches that hold memory on the device, over all stages: `held` where
        nothing of them is offloaded."""
        return self._stash.on_device if self._stash else self.held

    def has_room(self, move: StashMove, stage: int, is_near: bool = True) -> bool:
        """The device has room for the stash that work on a stage makes or brings back."""
        return self._stash is None or self._stash.admits(move, stage, is_near)

    def has_stepped(self, stage: int, stay: int) -> bool:
        """The weights that a stay of a stage is for have been stepped."""
        return self._lanes[stage].count[Gate.STEPPED] > stay

    def has_come(self, meaning: Meaning, stage: int, number: int) -> bool:
        """Every message of that meaning up to and including that number is here."""
        return self._lanes[stage].count[meaning] > number

    # Where the job stands.

    def ask_step(self) -> None:
        """The user wants one more step."""
        self.asked += self.microbatches
        self._look_again()

    @property
    def finished(self) -> bool:
        """Everything asked for is done on this rank, and whole weights have been let go."""
        if self.job.trains:
            room = self.job.stays.room if self.job.stays else 0
            is_done = self.job.first_of(self._steps_done) >= self.asked
            return is_done and self._free[Pool.ROOMS] == room
        return self.end is not None and all(
            lane.finished[Kind.BACKWARD] >= self.end for lane in self._lanes.values()
        )

    @property
    def settled(self) -> bool:
        """All state that is offloaded is where it belongs, for every step that is done."""
        return not self.job.slots or self._table.steps_finished(Gate.STORED) >= self._steps_done

    @property
    def cut_short(self) -> bool:
        """A reader has ended within a step that was asked for; that step cannot be finished."""
        return self.job.trains and self.end is not None and self.end < self.asked

    def microbatch_to_read(self) -> int | None:
        """The number of the microbatch that this rank's reader should read now, or None.

        It lies within the step that is open at stage 0, one ahead of that stage. Of two pipes only
        one begins here, and the other must never wait for this one, so a whole step is read ahead.
        """
        if not self.reads or self.end is not None:
            return None
        read = self.asked
        for lane, meaning in self._entries:
            if lane.count[meaning] < read:
                read = lane.count[meaning]
        count, ahead = self._lanes[0].count, 1 if self.placement.pipes == 1 else self.microbatches
        is_next = read < self.asked and read < count[Kind.FORWARD] + ahead
        if not is_next or read >= count[Gate.WEIGHTS]:
            return None
        if self.job.drawn and not self._admits_forward(read):
            return None
        return read

    def _admits_forward(self, number: int) -> bool:
        """Stage 0 has room for a forward now: what replicas share is not taken before."""
        return self._admits(
            self._entry_of[Kind.FORWARD, 0, None].row, Task(Kind.FORWARD, 0, number)
        )

    def _admits(self, row: Row, head: Task) -> bool:
        """The head of a row has room to run now, and the policy lets it, where it is asked."""
        if row.level and not self.policy.admits(head, self):
            return False
        return row.admitted is always or row.admitted(head, self)

    # Moves.

    def is_here(self, message: Message) -> bool:
        """The message is addressed to a stage of this rank."""
        return self.pipe_of.get(message.stage) == message.pipe

    def place_of(self, message: Message) -> Coordinates:
        """The coordinates of the rank that a message is for."""
        return Coordinates(*self.placement.place_of(message.pipe, message.stage))

    def deliver(self, message: Message) -> None:
        """Take in a message: a fact that became true elsewhere.

        Raises:
            IllegalMove: the message cannot be true here.
        """
        meaning, stage, number, pipe, _ = message
        inbox = self._inboxes.get((meaning, stage))
        if inbox is not None:
            lane, of_pipe, answers = inbox
            count = lane.count
            # The very message that its counter waits for, of a step that is open: nothing that
            # `_addressed` refuses can be wrong with it. Nearly all messages are such ones.
            is_next = pipe == of_pipe and number == count[meaning] < count[Gate.WEIGHTS]
            if is_next and (answers is None or number < count[answers]):
                lane.arrive(meaning, number)
                return
        self._deliver_checked(message)

    def _deliver_checked(self, message: Message) -> None:
        """Take in a message that may not be the next one, or is none about a microbatch."""
        if message.meaning is Meaning.END:
            self._hear_end(message)
            return
        if message.meaning is Meaning.TURN:
            self._hear_turn(message)
            return
        self._addressed(message).arrive(message.meaning, message.number)
        if message.meaning in self._table.wakers:
            self._look_again()

    # Heads are scanned, not woken. Counters that wake the heads that wait for them were thought of.
    # A scan of the few rows of a rank makes no call, and nothing can be woken too late.
    def pick(self, queue: Queue = OnDevice.COMPUTE) -> Task | None:
        """The task that starts next on a queue: of all heads that may run now, the one with the
        least turn.

        Returns:
            None where no head of the queue may run. Nothing changes until `start`.
        """
        ready: list[tuple[Row, Task]] = []
        asked, untold, policy = self.asked, self._untold, self.policy
        for entry, kind, stage, heads, parts, needs in self._table.often[queue]:
            # Inputs of a step that was not asked for here may have come: another rank is in its
            # next call, and the user of this one may do something before.
            if (number := heads[kind]) >= asked or (untold and (kind, stage) in untold):
                continue
            for numbers, counter, _ in needs:  # `Lane.is_ready`, without a call for every row
                if numbers[counter] <= number:
                    break
            else:
                row, head = entry.row, entry.made
                if head is None or head.microbatch != number or head.part != parts[kind]:
                    head = entry.head()
                # `_admits`, without a call
                may_run = not row.level or policy.admits(head, self)
                if may_run and (row.admitted is always or row.admitted(head, self)):
                    ready.append((row, head))
        if self._look[queue]:
            ready += self._ready_of_a_step(queue)
        if not ready:
            return None
        _, head = ready[0]
        return self._least(ready) if len(ready) > 1 else head

    def _least(self, ready: Sequence[tuple[Row, Task]]) -> Task:
        """The head with the least key; of equal ones the first."""
        least: tuple[int, ...] | None = None
        for row, head in ready:
            turn = row.turn
            key = turn(head, self) if turn else (row.level, *self.policy.key(head, self))
            if least is None or key < least:
                first, least = head, key
        return first

    def _ready_of_a_step(self, queue: Queue) -> list[tuple[Row, Task]]:
        """The heads of a queue that may run now and do not count microbatches. It also notes
        whether it is worth looking again before an event that `_look_again` tells of."""
        once = [entry for entry in self._table.once[queue] if entry.lane.is_ready(entry.kind)]
        heads = [(entry.row, entry.head()) for entry in once]
        ready = [
            (row, head)
            for row, head in heads
            if self.job.first_for(*head[:3]) < self.asked
            and self._admits(row, head)
            and self._has_turn(row, head)
            and self._has_room(row)
        ]
        # Whether the others may run may change at any time, but for those that an event wakes.
        others = (entry.row.takes is None and not entry.row.fills for entry in once)
        self._look[queue] = bool(ready) or any(others)
        return ready

    def queue_of(self, task: Task) -> Queue:
        """The queue on which a task of this rank runs.

        Raises:
            IllegalMove: this rank has several queues, and no such task.
        """
        return self.queues[0] if self._has_one_queue else self._row_of(task, "run").row.queue

    def is_early(self, task: Task, more: bool) -> bool:
        """By the policy's plan other work comes before a picked task, and should be here any
        moment.

        Args:
            task: a task that may start.
            more: the task is a piece, and not the last. A piece is not long in the way, and never
                early.
        """
        if task.kind not in self.may_be_early or more or task.part > 0:
            return False
        return self._row_of(task, "start").row.early(task, self)

    def why_idle(self) -> str:
        """The cause of an idle rank, one of `CAUSES`; for when `pick` has found nothing, or
        something early."""
        for entry in self._table.entries:
            row, lane, kind = entry.row, entry.lane, entry.kind
            if row.fills or (row.level == 0 and row.admitted is always):
                continue
            first = self.job.first_for(kind, entry.stage, lane.count[kind])
            if first < self.asked and lane.is_ready(kind):
                return ROOM
        if self._waits_for_copies():
            return COPIES
        return END if self.finished else INPUT

    def _waits_for_copies(self) -> bool:
        """A step, its commit, a forward or a backward lacks nothing but what is on its way; or a
        step on the host is under way."""
        entries = self._table.entries
        missing = [{counter for _, counter in of.lane.missing(of.kind)} for of in entries]
        if any({copy} in missing for copy in (Kind.FETCH, Kind.RELOAD)):
            return True
        if self.job.offloads_weights and any({gate} in missing for gate in _WHOLE_WEIGHTS):
            return True
        waits = any(of.kind is Kind.UNLOAD and of.lane.is_ready(of.kind) for of in entries)
        return waits or any(task.kind in _ON_HOST for task in self._running)

    def start(
        self, task: Task, more: bool | None = False, completes: Collection[int] = ()
    ) -> list[Message]:
        """Count a task as started; it runs from now on.

        Args:
            more: the task is a piece, and not the last. None: that is not known before it has run,
                and `tell` says it then; nothing follows before.
            completes: indices of the buckets of the stage whose gradient is complete with this
                piece; the last piece completes all others.
        Returns:
            The messages that are true on this rank from now on; they have been delivered.
        Raises:
            IllegalMove: the task is not a ready head, where this brain checks.
        """
        kind, stage, _, part = task
        if self._checks:
            self._check_start(task)
        entry = self._entry_of[kind, stage, part if kind.of_a_bucket else None]
        if more is None and kind.in_pieces:
            self._untold[kind, stage] = task
            self._running[task] = entry, [], False
            return []
        if completes:
            self._check_completes(task, completes)
        return self._count(task, entry, bool(more), completes)

    def _check_start(self, task: Task) -> None:
        """Refuse a task that is no ready head."""
        kind, stage, number, part = task
        entry = self._row_of(task, "start")
        row, lane = entry.row, entry.lane
        if number != lane.count[kind] or part != lane.part[kind] or not lane.is_ready(kind):
            piece = f"piece {lane.part[kind]} is next; " if part != lane.part[kind] else ""
            raise IllegalMove(f"{task} cannot start: {piece}{self._story(stage)}")
        if (kind, stage) in self._untold:
            raise IllegalMove(f"{task} cannot start: it runs; {self._story(stage)}")
        if (row.in_turn or row.in_order) and not self._has_turn(row, task):
            raise IllegalMove(f"{task} cannot start: it is not its turn; {self._story(stage)}")
        if row.takes is not None and not self._has_room(row):
            raise IllegalMove(
                f"{task} cannot start: no {row.takes.value} is free; {self._story(stage)}"
            )
        if row.stash is not None and not self.has_room(row.stash, stage):
            raise IllegalMove(
                f"{task} cannot start: no room on the device is free; {self._story(stage)}"
            )

    def tell(self, task: Task, more: bool, completes: Collection[int] = ()) -> list[Message]:
        """Say whether a task that has run was a piece; see `start`.

        Raises:
            IllegalMove: the task has not started, or was told before.
        """
        kind, stage, *_ = task
        if self._untold.get((kind, stage)) != task:
            raise IllegalMove(f"{task} cannot be told: {self._story(stage)}")
        if completes:
            self._check_completes(task, completes)
        del self._untold[kind, stage]
        return self._count(task, self._row_of(task, "be told"), more, completes)

    def _check_completes(self, task: Task, completes: Collection[int]) -> None:
        buckets = len(self._table.buckets[task.stage])
        if not set(completes) <= set(range(buckets)):
            raise IllegalMove(
                f"{task} cannot complete buckets {completes}; the stage has {buckets}: "
                f"{self._story(task.stage)}"
            )

    def _count(
        self, task: Task, entry: Entry, more: bool, completes: Collection[int]
    ) -> list[Message]:
        """Count a task that runs, and deliver what follows from it here."""
        kind, _, number, _ = task
        row = entry.row
        if self.memo:
            self.memo.clear()
        whole = entry.lane.start(kind, more)
        if whole:
            self.in_flight += row.in_flight
            self.held += row.held
        if entry.takes_places:
            self._take_places(row, whole, task)
        # Of a kind that does not count microbatches every task ends something.
        ends = not kind.of_a_microbatch or self._marks.ends_run[number % self.microbatches]
        follows = self._what_follows(task, row, whole, completes) if ends else ()
        sends = row.sends if whole else None
        here: list[Message] = []
        later: list[Message] = []
        if sends is not None:
            message = Message(sends.meaning, sends.stage, number, sends.pipe)
            if entry.sends_at_once:
                here = [message]
            else:
                later = [message]
        for message in follows:
            (here if self._holds_at_once(message, row) else later).append(message)
        self._running[task] = entry, later, not whole
        for message in here:
            self.deliver(message)
        if ends or (self._order_of_stays and self._ends_a_stay(task)):
            self._look_again()
        return here

    def _what_follows(
        self, task: Task, row: Row, whole: bool, completes: Collection[int]
    ) -> list[Message]:
        """The messages that follow from a task that ends a step, or a reduction, besides the one
        that each task sends."""
        follows: list[Message] = []
        is_last = (
            not task.kind.of_a_microbatch
            or self._marks.ends_step[task.microbatch % self.microbatches]
        )
        if whole and is_last:
            follows += row.then(task)
        if row.completes is not None:
            follows += self._leaving(row, task, whole, completes)
        if row.gives_turns:
            turn = self._turns[task.stage, task.part].give()
            follows = [message._replace(number=turn) for message in follows]
        return follows

    def _take_places(self, row: Row, whole: bool, task: Task) -> None:
        """Take the turn and the places that a task takes, and open what waited for it."""
        _, stage, number, part = task
        if row.in_turn:
            self._turns[stage, part].take()
        if row.takes is not None:
            self._free[row.takes] -= 1
            self._stays_begun += row.in_order
        if whole and row.stash is not None:
            self._take_stash_room(row.stash, stage, number)
        if whole and row.opens:
            self._open(row, stage)

    def _take_stash_room(self, move: StashMove, stage: int, number: int) -> None:
        """Take a room for a stash, where a task makes one or brings it back; one that stays on the
        device is neither taken down nor brought back."""
        if self._stash is None:
            return
        if move is StashMove.BRINGS_BACK:
            self._stash.bring_back(stage, number)
        elif move is StashMove.MAKES and self._stash.make(stage):
            for kind in (Kind.OFFLOAD, Kind.RELOAD):
                self._lanes[stage].skip(kind, number)

    def _free_stash_room(self, move: StashMove, stage: int, number: int) -> None:
        """Free the room of a stash that has gone down, or was used up."""
        if self._stash is None:
            return
        if move is StashMove.TAKES_DOWN:
            self._stash.take_down()
        elif move is StashMove.USES_UP:
            self._stash.use_up(stage, number)

    def _ends_a_stay(self, task: Task) -> bool:
        """The task may be the last that a stay is for."""
        kind, stage, *_ = task
        if kind not in READERS:
            return False
        begins = Kind.BRING if self.job.offloads_weights else Kind.SHARE
        begun = self._lanes[stage].count[begins]
        return self.started(kind, stage) == self.job.until(stage, kind, begun)

    def _leaving(
        self, row: Row, task: Task, whole: bool, completes: Collection[int]
    ) -> Iterator[Message]:
        """What follows for buckets that a task, or a piece of it, completes."""
        done = self._completed[task.stage]
        buckets = range(len(self._table.buckets[task.stage]))
        for bucket in buckets if whole else completes:
            if bucket not in done:
                assert row.completes is not None
                done.add(bucket)
                yield from row.completes(task, bucket)
        if whole:
            done.clear()

    def finish(self, task: Task) -> list[Message]:
        """Count a started task as finished.

        Returns:
            The messages that were not true at its start: those to other ranks, and those for the
            host.
        Raises:
            IllegalMove: the task has not started or not been told, or one before it has not
                finished, where this brain checks.
        """
        if self._checks and not self._may_finish(task):
            raise IllegalMove(f"{task} cannot finish: {self._story(task.stage)}")
        entry, later, more = self._running[task]
        del self._running[task]
        if more:
            return later
        row, stage = entry.row, entry.stage
        entry.lane.finish(task.kind)
        if row.opens:
            self._open(row, stage)
            self._steps_done = self._table.steps_finished(Gate.WEIGHTS)
        if row.frees is not None:
            self._free[row.frees] += 1
        if row.stash is not None:
            self._free_stash_room(row.stash, stage, task.microbatch)
        if row.frees is not None or not self._has_one_queue:
            self._look_again()
        return later

    def _open(self, row: Row, stage: int) -> None:
        """Open the gates of a row if this was the last task that they waited for."""
        for gate, _ in row.opens:
            self._lanes[stage].count[gate] = self._table.open_to(stage, gate)

    def _holds_at_once(self, message: Message, row: Row) -> bool:
        """A message that follows from a task of the row is true already when the task starts."""
        if message.meaning.for_the_host or not self.is_here(message):
            return False
        return self._has_one_queue or self._table.hears_at_once(message, row)

    def _may_finish(self, task: Task) -> bool:
        """Of what runs of a kind on a stage, or on a bucket of it, the task has started first, and
        it has been told whether it is a piece."""
        if self._untold and task in self._untold.values():
            return False
        of_a_bucket = task.kind.of_a_bucket
        for one in self._running:  # in the order of their starts; a few at most
            if one[:2] == task[:2] and (not of_a_bucket or one.part == task.part):
                return one == task
        return False

    def waiting_for(self) -> list[Lack]:
        """For every head that was asked for and may not run now: what it lacks, and which rank owes
        it."""
        wanted = self.asked if self.end is None else min(self.asked, self.end)
        lacks: list[Lack] = []
        for entry in self._table.entries:
            head = entry.head()
            if self.job.first_for(*head[:3]) >= wanted:
                continue
            missing = [
                Lack(head, counter.value, self._owner(lane, counter))
                for lane, counter in entry.lane.missing(head.kind)
            ]
            if not (missing or entry.row.fills or self._admits(entry.row, head)):
                missing = [Lack(head, ROOM, None)]
            if not (missing or self._has_turn(entry.row, head)):
                missing = [self._earlier_turn(entry, head)]
            if not (missing or self._has_room(entry.row)):
                assert entry.row.takes is not None
                missing = [Lack(head, f"a {entry.row.takes.value}", None)]
            lacks += missing
        return lacks + [lack for task in self._running for lack in self._others_in(task)]

    def _earlier_turn(self, entry: Entry, head: Task) -> Lack:
        """The lack of a task whose turn is known, and not the one before it."""
        if entry.row.in_order:
            return Lack(head, "the stay before it", None)
        (needed,) = entry.needs
        return Lack(head, Meaning.TURN.value, self._owner(needed.lane, Meaning.TURN))

    def _others_in(self, task: Task) -> list[Lack]:
        """The ranks that a collective under way needs: it ends when all of them have joined."""
        if not self._running[task][0].row.in_turn:
            return []
        return [
            Lack(task, "its end", Coordinates(*place))
            for place in self._groups[task.stage, task.part]
            if place != (self.replica, self.rank)
        ]

    def _has_turn(self, row: Row, task: Task) -> bool:
        """The task needs no turn, or the next one of its group is for its bucket; and stays begin
        in their order."""
        which = task.stage, task.part
        order = self._order_of_stays
        if row.in_order and order[self._stays_begun % len(order)] != task.stage:
            return False
        return not row.in_turn or self._turns[which].is_for(which)

    def _has_room(self, row: Row) -> bool:
        """The work takes nothing that a rank has a few of, or one is free."""
        return row.takes is None or self._free[row.takes] > 0

    def _look_again(self) -> None:
        """Note an event for which work of once a step may have waited."""
        self._look = dict.fromkeys(self.queues, True)

    def _owner(self, lane: Lane, counter: Counter) -> Coordinates | None:
        """The coordinates of the rank that owes the next of what is counted; None for this rank."""
        seat = lane.owner(counter)
        place = None if seat is None else Coordinates(*self.placement.place_of(*seat))
        return None if place == (self.replica, self.rank) else place

    # Refusals.

    def _row_of(self, task: Task, to: str) -> Entry:
        """The row of a task, and its lane; refused where there is none."""
        kind, stage, _, part = task
        entry = self._entry_of.get((kind, stage, part if kind.of_a_bucket else None))
        if entry is None:
            raise IllegalMove(f"{task} cannot {to}: {self._story(task.stage)}")
        return entry

    def _hear_end(self, message: Message) -> None:
        """Take in the end of the data: training ends where the first reader ends, and in an
        evaluation each replica ends by itself."""
        if not self.is_here(message):
            raise IllegalMove(f"{message}: {Coordinates(self.replica, self.rank)} is not there")
        steps = {self.job.step_of(end)[0] for end in (message.number, self.end) if end is not None}
        if self.end is not None and (not self.job.trains or len(steps) > 1):
            raise IllegalMove(
                f"the end was told before: {plural(self.end, 'microbatch')}, and now "
                f"{message.number}"
            )
        self.end = message.number if self.end is None else min(self.end, message.number)

    def _hear_turn(self, message: Message) -> None:
        """Take in whose turn it is, or will be: turns may overtake each other."""
        which = message.stage, message.bucket
        turns = self._turns.get(which) if self.is_here(message) else None
        if turns is not None and turns.is_known(message.number):
            raise IllegalMove(f"{message} has come before: {self._story(message.stage)}")
        step = message.number if turns is None else turns.step_of(message.number)
        self._addressed(message._replace(number=step)).arrive(Meaning.TURN, step)
        if turns is not None:
            turns.hear(message.number, which)
        self._look_again()

    def _addressed(self, message: Message) -> Lane:
        """The lane that the message is for; refused where it cannot be true."""
        meaning, stage, number = message.meaning, message.stage, message.number
        lane = self._table.lane_of(message) if self.is_here(message) else None
        if lane is None:
            place = Coordinates(self.replica, self.rank)
            raise IllegalMove(f"{message}: {place} holds stages {sorted(self._lanes)}")
        if refusal := lane.refusal(meaning, number):
            raise IllegalMove(f"{message} {refusal}: {lane}")
        weights = self._lanes[stage].count[Gate.WEIGHTS]
        if self.job.trains and (not meaning.of_a_microbatch or number >= weights):
            step, _ = self.job.step_of(weights)
            if lane.step_of(meaning, number) > step:
                raise IllegalMove(
                    f"{message} is of step {lane.step_of(meaning, number)}, neither this one nor "
                    f"the next: {lane}"
                )
        if not self.job.trains and self.end is not None and number >= self.end:
            raise IllegalMove(f"{message}, but there are {plural(self.end, 'microbatch')}: {lane}")
        return lane

    def _story(self, stage: int) -> str:
        if stage not in self._lanes:
            return f"rank {self.rank} holds stages {sorted(self._lanes)}"
        return self._table.story(stage)
