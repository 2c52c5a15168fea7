"""The state of one rank: what it knows, what it may do next, and what follows from that."""

# The table of work (`rules`) says of every kind what its head needs, its priority, and which
# messages follow. Here rows are counted, picked and refused, every kind alike. All knowledge is
# kept in counters (`counters.py`), one for each stage on this rank and one for each bucket of
# such a stage.
#
# A need on the same rank and queue is met when its task has *started*: tasks of one queue run in
# the order in which they were started. Between queues a need is met when the task has *finished*,
# and a message to another rank is true then. News for the host wait for the end even on their own
# rank, since the host needs their values. On a CPU with one queue the two moments coincide.
#
# Work that may come in pieces says whether it was one when it has run. Where that is not at its
# start it is told later (`tell`), and its kind has no head until then.
#
# `deliver`, `start`, `tell` and `finish` are the only moves. An illegal one raises `IllegalMove`
# with the counters' story and changes nothing. Examples are a message that comes twice, a gradient
# before its forward, a step that is neither this one nor the next, a task that is not a ready head.
# A loop that starts what `pick` gives makes no illegal start, so that of a run does without those
# two checks.
#
# Two facts bound everything: forwards of step t+1 wait for the stage's own step t, so at most two
# steps are alive there; and a policy's cap bounds forwards in flight, so every mailbox, too.

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from .bucket import Copies, copies_by_pipe
from .counters import Counters, Gate
from .follows import Follows
from .job import Job, StageCopy
from .lacks import Coordinates, Diagnosis, Lack
from .message import Meaning, Message
from .picking import Picking
from .refusals import IllegalMove, Refusals
from .resources import Resources
from .rules import Feature, OnDevice, Queue, Row, features_of
from .rules.collectives import groups_of
from .running import Running
from .table import UNLIMITED, Entry, Table
from .task import Kind, Task
from .tickets import tickets_of


class RankState(Picking):
    """The brain of one rank.

    Args:
        rank: index of this rank in its pipeline, 0 <= rank < job.ranks.
        replica: index of the replica that this rank belongs to, 0 <= replica < job.replicas.
        member: index of this rank among those that hold its stages together, 0 <= member <
            job.team.
        buckets: copies of each bucket of a stage, by stage of this rank, at least one bucket a
            stage; None: one bucket a stage, held by every pipe.
        first_step: number of the step to begin with, at least 0; no history is needed.
        features: functions that make the rows of the table; None: those of the job.
        checks: True to refuse starts and ends that cannot be. A loop that starts what `pick` has
            given can make none, and may do without; messages are always checked, since they come
            from elsewhere.
    Attributes:
        reads: this rank's reader reads the microbatches of its replica.
        queues, beside: queues on which some work here runs; those but that of the device's tasks.
        may_be_early: kinds of work whose heads may be early.
    """

    def __init__(
        self,
        job: Job,
        rank: int,
        *,
        replica: int = 0,
        member: int = 0,
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
        self.in_flight = self.held = 0  # what the counters come to
        self.reads = rank == self.placement.rank_of(0) and member == 0
        self._marks = job.marks()
        self.memo: dict[Any, Any] = {}
        self.reached: dict[Any, int] = {}
        self._steps_done = first_step
        self.pipe_of = {stage: job.pipe_of(replica, rank, stage, member) for stage in stages}
        buckets = buckets or {
            stage: (copies_by_pipe(stage, 0, job.pipes, job.team, member),) for stage in stages
        }
        groups = groups_of(job, {stage: buckets[stage] for stage in stages})
        stage_copies = [StageCopy(pipe, stage) for stage, pipe in self.pipe_of.items()]
        table = self._table = Table(job, stage_copies, buckets, features or features_of(job))
        self._counters, self.queues = table.counters_of, table.queues
        self._entry_of = table.entry_of
        me = Coordinates(replica, rank * job.team + member)
        tickets = tickets_of(groups, first_step)
        running = self._running = Running()
        resources = self._resources = Resources(job, rank, tickets, self._counters)
        self._follows = Follows(job, self.pipe_of, table, tickets)
        self._refusals = Refusals(job, me, self.pipe_of, table, running, resources)
        self._diagnosis = Diagnosis(job, me, table, running, resources, groups)
        # Those of messages that wake no work of once a step; an evaluation has an end instead of
        # steps, and checks every message against it.
        self._inboxes = {
            address: inbox
            for address, inbox in table.inboxes.items()
            if job.trains and address[0] not in table.wakers
        }
        self._has_one_queue = len(self.queues) == 1
        self.beside = [queue for queue in self.queues if queue is not OnDevice.COMPUTE]
        self.may_be_early = table.early
        self._look_again()
        self._entries = list(self._entered())
        for counters in table.all_counters():
            counters.begin_at(first_step)

    def _entered(self) -> Iterator[tuple[Counters, Meaning]]:
        """For each pipe whose first or last stage is here, the counters and meaning by which this
        rank sees how far its reader has come."""
        last = self.job.last_stage
        for pipe in range(self.placement.pipes):
            stage, meaning = (0, Meaning.ACTIVATION) if pipe == 0 else (last, Meaning.TARGET)
            if self.rank == self.placement.rank_of(stage, pipe):
                yield self._counters[stage], meaning

    # Where the job stands.

    def ask_step(self) -> None:
        """The user wants one more step."""
        self.asked += self.microbatches
        self._look_again()

    @property
    def finished(self) -> bool:
        """Everything asked for is done on this rank, and whole weights have been let go."""
        if self.job.trains:
            is_done = self.job.first_of(self._steps_done) >= self.asked
            return is_done and self._resources.none_gathered
        return self.end is not None and all(
            counters.finished[Kind.BACKWARD] >= self.end for counters in self._counters.values()
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
        for counters, meaning in self._entries:
            if counters.count[meaning] < read:
                read = counters.count[meaning]
        count = self._counters[0].count
        ahead = 1 if self.placement.pipes == 1 else self.microbatches
        is_next = read < self.asked and read < count[Kind.FORWARD] + ahead
        if not is_next or read >= count[Gate.WEIGHTS]:
            return None
        if self.job.drawn:  # what replicas share is not taken before stage 0 has room for it
            row = self._entry_of[Kind.FORWARD, 0, None].row
            return read if self._admits(row, Task(Kind.FORWARD, 0, read)) else None
        return read

    # Moves.

    def deliver(self, message: Message) -> None:
        """Take in a message: a fact that became true elsewhere.

        Raises:
            IllegalMove: the message cannot be true here.
        """
        meaning, stage, number, pipe, _ = message
        inbox = self._inboxes.get((meaning, stage))
        if inbox is not None:
            counters, of_pipe, answers = inbox
            count = counters.count
            # The very message that its counter waits for, of a step that is open: nothing that
            # `Refusals.addressed` refuses can be wrong with it. Nearly all messages are such ones.
            is_next = pipe == of_pipe and number == count[meaning] < count[Gate.WEIGHTS]
            if is_next and (answers is None or number < count[answers]):
                counters.arrive(meaning, number)
                return
        self._deliver_checked(message)

    def _deliver_checked(self, message: Message) -> None:
        """Take in a message that may not be the next one, or is none about a microbatch."""
        if message.meaning is Meaning.END:
            self._hear_end(message)
        elif message.meaning is Meaning.TICKET:
            self._hear_ticket(message)
        else:
            self._refusals.addressed(message, self.end).arrive(message.meaning, message.number)
            if message.meaning in self._table.wakers:
                self._look_again()

    def queue_of(self, task: Task) -> Queue:
        """The queue on which a task of this rank runs.

        Raises:
            IllegalMove: this rank has several queues, and no such task.
        """
        return (
            self.queues[0] if self._has_one_queue else self._refusals.row_of(task, "run").row.queue
        )

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
        return self._refusals.row_of(task, "start").row.early(task, self)

    def why_idle(self) -> str:
        """The cause of an idle rank, one of `CAUSES`; for when `pick` has found nothing, or
        something early."""
        return self._diagnosis.why_idle(self.asked, self.finished)

    def waiting_for(self) -> list[Lack]:
        """For every head that was asked for and may not run now: what it lacks, and which rank owes
        it."""
        wanted = self.asked if self.end is None else min(self.asked, self.end)
        return self._diagnosis.waiting_for(wanted, self._admits)

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
            self._refusals.check_start(task)
        entry = self._entry_of[kind, stage, part if kind.of_a_bucket else None]
        if entry.row.joints is not None:
            more = part < entry.row.joints.number
        if more is None and kind.in_pieces:
            self._running.run_untold(task)
            self._running.tasks[task] = entry, [], False
            return []
        if completes:
            self._refusals.check_completes(task, completes)
        return self._count(task, entry, bool(more), completes)

    def tell(self, task: Task, more: bool, completes: Collection[int] = ()) -> list[Message]:
        """Say whether a task that has run was a piece; see `start`.

        Raises:
            IllegalMove: the task has not started, or was told before.
        """
        kind, stage, *_ = task
        if self._running.untold.get((kind, stage)) != task:
            raise IllegalMove(f"{task} cannot be told: {self._refusals.story(stage)}")
        if completes:
            self._refusals.check_completes(task, completes)
        self._running.is_told(task)
        return self._count(task, self._refusals.row_of(task, "be told"), more, completes)

    def _count(
        self, task: Task, entry: Entry, more: bool, completes: Collection[int]
    ) -> list[Message]:
        """Count a task that runs, and deliver what follows from it here."""
        kind, _, number, _ = task
        row = entry.row
        if self.memo:
            self.memo.clear()
        whole = entry.counters.start(kind, more)
        # Memory counts from the first piece that takes it to the last one that needs it; of a
        # backward with joints to the first: its other pieces ask nobody, and members that run other
        # tasks meanwhile must not refuse each other's forwards for ever (`policies/policy.py`).
        counts = task.part == 0 if row.held > 0 or row.joints is not None else whole
        if counts:
            self.in_flight += row.in_flight
            self.held += row.held
        if entry.takes_places:
            self._take(task, entry, counts, whole)
        # Of a kind that does not count microbatches every task ends something.
        ends = not kind.of_a_microbatch or self._marks.ends_run[number % self.microbatches]
        may_follow = ends or row.joints is not None
        follows = self._follows.of(task, row, whole, completes) if may_follow else ()
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
            (here if self._follows.holds_at_once(message, row) else later).append(message)
        self._running.tasks[task] = entry, later, not whole
        for message in here:
            self.deliver(message)
        if ends or (self._resources.in_order and self._follows.may_end_a_residency(task)):
            self._look_again()
        return here

    def finish(self, task: Task) -> list[Message]:
        """Count a started task as finished.

        Returns:
            The messages that were not true at its start: those to other ranks, and those for the
            host.
        Raises:
            IllegalMove: the task has not started or not been told, or one before it has not
                finished, where this brain checks.
        """
        if self._checks:
            self._refusals.check_finish(task)
        entry, later, more = self._running.tasks.pop(task)
        if more:
            return later
        row, stage = entry.row, entry.stage
        entry.counters.finish(task.kind)
        if row.opens:
            self._open(row, stage)
            self._steps_done = self._table.steps_finished(Gate.WEIGHTS)
        if row.frees is not None or row.stash is not None:
            self._resources.give_back(row, stage, task.microbatch)
        if row.frees is not None or not self._has_one_queue:
            self._look_again()
        return later

    def _take(self, task: Task, entry: Entry, counts: bool, whole: bool) -> None:
        """Take the places that a task takes, open what it opens, and note where it stands.

        Args:
            counts: its memory counts from now on.
            whole: it is no piece, or the last one.
        """
        row = entry.row
        self._resources.take(row, counts, task)
        if whole and row.opens:
            self._open(row, task.stage)
        if row.joints is not None:
            self._running.pass_joint(entry, whole)

    def _open(self, row: Row, stage: int) -> None:
        """Open the gates of a row if this was the last task that they waited for."""
        for gate, _ in row.opens:
            self._counters[stage].count[gate] = self._table.open_to(stage, gate)

    def _look_again(self) -> None:
        """Note an event for which work of once a step may have waited."""
        self._look = dict.fromkeys(self.queues, True)

    def _hear_end(self, message: Message) -> None:
        """Take in the end of the data: training ends where the first reader ends, and in an
        evaluation each replica ends by itself."""
        self._refusals.check_end(message, self.end)
        self.end = message.number if self.end is None else min(self.end, message.number)

    def _hear_ticket(self, message: Message) -> None:
        """Take in whose ticket it is, or will be: tickets may overtake each other."""
        which = message.stage, message.bucket
        tickets = self._resources.tickets.get(which) if self.is_here(message) else None
        if tickets is not None and tickets.is_known(message.number):
            raise IllegalMove(f"{message} has come before: {self._refusals.story(message.stage)}")
        step = message.number if tickets is None else tickets.step_of(message.number)
        counters = self._refusals.addressed(message._replace(number=step), self.end)
        counters.arrive(Meaning.TICKET, step)
        if tickets is not None:
            tickets.hear(message.number, which)
        self._look_again()
