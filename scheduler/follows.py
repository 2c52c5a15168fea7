"""Which messages follow from a task."""

from collections.abc import Collection, Iterator, Mapping

from .counters import Joints
from .job import Job
from .message import Message, numbered
from .numbering import joints_before
from .residencies import READERS
from .rules import Row
from .table import Table
from .task import Kind, Task
from .tickets import Tickets, Which


class Follows:
    """What follows from the tasks of one rank.

    Args:
        pipe_of: pipe of each stage of this rank.
        tickets: tickets of the groups that buckets here belong to, by stage and bucket.
    """

    def __init__(
        self, job: Job, pipe_of: Mapping[int, int], table: Table, tickets: Mapping[Which, Tickets]
    ) -> None:
        self._job, self._pipe_of, self._table, self._tickets = job, pipe_of, table, tickets
        self._marks, self._a_step = job.marks(), job.microbatches
        self._has_one_queue = len(table.queues) == 1
        # The buckets of a stage that pieces of the task at its head have completed.
        self._completed: dict[int, set[int]] = {stage: set() for stage in pipe_of}

    def of(self, task: Task, row: Row, whole: bool, completes: Collection[int]) -> list[Message]:
        """The messages that follow from a task that ends a step or a reduction, or has joints,
        besides the one that each task sends.

        Args:
            whole: it is no piece, or the last one.
            completes: buckets that a piece completes.
        """
        follows: list[Message] = []
        within = task.microbatch % self._a_step
        is_last = not task.kind.of_a_microbatch or self._marks.ends_step[within]
        if whole and is_last:
            follows += row.then(task)
        if row.completes is not None and self._marks.ends_run[within]:
            follows += self._leaving(row, task, whole, completes)
        if row.joints is not None and not whole:
            follows += self._slices(task, row.joints)
        if row.gives_tickets:
            ticket = self._tickets[task.stage, task.part].give()
            follows = [message._replace(number=ticket) for message in follows]
        return follows

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

    def _slices(self, task: Task, joints: Joints) -> Iterator[Message]:
        """A piece that a joint follows on: a message to each other member."""
        pipe = self._pipe_of[task.stage]
        pipes = self._job.placement.pipes
        joint = joints_before(task.microbatch, task.part, joints.number, pipes)
        team = self._job.team_of(pipe)
        for to in joints.members:
            senders = [other for other in team if other != to.pipe]
            yield Message(joints.meaning, to.stage, numbered(joint, senders, pipe), to.pipe)

    def holds_at_once(self, message: Message, row: Row) -> bool:
        """A message that follows from a task of the row is true already when the task starts."""
        if message.meaning.for_the_host or self._pipe_of.get(message.stage) != message.pipe:
            return False
        return self._has_one_queue or self._table.hears_at_once(message, row)

    def may_end_a_residency(self, task: Task) -> bool:
        """The task may be the last that a residency is for."""
        kind, stage, *_ = task
        if kind not in READERS:
            return False
        begins = Kind.BRING if self._job.offloads_weights else Kind.SHARE
        count = self._table.counters_of[stage].count
        started = count[kind] // self._job.placement.pipes
        return started == self._job.until(stage, kind, count[begins])
