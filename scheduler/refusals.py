"""Which moves of a rank's brain cannot be, and the story that a refusal tells."""

from collections.abc import Collection

from .counters import Counters, Gate
from .job import Job
from .lacks import Coordinates
from .message import Message
from .plural import plural
from .resources import Resources
from .running import Running
from .table import Entry, Table
from .task import Task


class IllegalMove(AssertionError):
    """An event that cannot happen. Nothing was changed, and the text tells the counters' story."""


class Refusals:
    """Looks at moves before they are counted. Nothing is changed here."""

    def __init__(
        self,
        job: Job,
        me: Coordinates,
        pipe_of: dict[int, int],
        table: Table,
        running: Running,
        resources: Resources,
    ) -> None:
        self._job, self._me, self._pipe_of = job, me, pipe_of
        self._table, self._running, self._resources = table, running, resources

    def row_of(self, task: Task, to: str) -> Entry:
        """The row of a task, and its counters.

        Args:
            to: what was to be done with the task, for the text.
        Raises:
            IllegalMove: there is none.
        """
        kind, stage, _, part = task
        entry = self._table.entry_of.get((kind, stage, part if kind.of_a_bucket else None))
        if entry is None:
            raise IllegalMove(f"{task} cannot {to}: {self.story(task.stage)}")
        return entry

    def check_start(self, task: Task) -> None:
        """Raise `IllegalMove` for a task that is no ready head."""
        kind, stage, number, part = task
        entry = self.row_of(task, "start")
        row, counters = entry.row, entry.counters
        if (
            number != counters.count[kind]
            or part != counters.part[kind]
            or not counters.is_ready(kind)
        ):
            piece = f"piece {counters.part[kind]} is next; " if part != counters.part[kind] else ""
            raise IllegalMove(f"{task} cannot start: {piece}{self.story(stage)}")
        if (kind, stage) in self._running.untold:
            raise IllegalMove(f"{task} cannot start: it runs; {self.story(stage)}")
        if (row.by_ticket or row.in_order) and not self._resources.may_go(row, task):
            raise IllegalMove(f"{task} cannot start: another comes first; {self.story(stage)}")
        if row.takes is not None and not self._resources.has_place(row):
            raise IllegalMove(
                f"{task} cannot start: no {row.takes.value} is free; {self.story(stage)}"
            )
        is_begun = part > 0 and row.held > 0  # its first piece has taken the place
        admits = is_begun or row.stash is None or self._resources.admits_stash(row.stash, stage)
        if not admits:
            raise IllegalMove(
                f"{task} cannot start: the device has no place for its stash; {self.story(stage)}"
            )

    def check_completes(self, task: Task, completes: Collection[int]) -> None:
        """Raise `IllegalMove` for a piece that completes a bucket which the stage has not."""
        buckets = len(self._table.buckets[task.stage])
        if not set(completes) <= set(range(buckets)):
            raise IllegalMove(
                f"{task} cannot complete buckets {completes}; the stage has {buckets}: "
                f"{self.story(task.stage)}"
            )

    def check_finish(self, task: Task) -> None:
        """Raise `IllegalMove` for a task that cannot finish now."""
        if not self._running.may_finish(task):
            raise IllegalMove(f"{task} cannot finish: {self.story(task.stage)}")

    def addressed(self, message: Message, end: int | None) -> Counters:
        """The counters that a message is for.

        Args:
            end: number of microbatches there are; None as long as that is not known.
        Raises:
            IllegalMove: it cannot be true.
        """
        meaning, stage, number = message.meaning, message.stage, message.number
        is_here = self._pipe_of.get(stage) == message.pipe
        counters = self._table.counters_for(message) if is_here else None
        counters_of = self._table.counters_of
        if counters is None:
            raise IllegalMove(f"{message}: {self._me} holds stages {sorted(counters_of)}")
        if refusal := counters.refusal(meaning, number):
            raise IllegalMove(f"{message} {refusal}: {counters}")
        weights = counters_of[stage].count[Gate.WEIGHTS]
        if self._job.trains and (not meaning.of_a_microbatch or number >= weights):
            step, _ = self._job.step_of(weights)
            if counters.step_of(meaning, number) > step:
                raise IllegalMove(
                    f"{message} is of step {counters.step_of(meaning, number)}, neither this one "
                    f"nor the next: {counters}"
                )
        of_a_microbatch = meaning.of_a_microbatch
        if not self._job.trains and end is not None and of_a_microbatch and number >= end:
            raise IllegalMove(f"{message}, but there are {plural(end, 'microbatch')}: {counters}")
        return counters

    def check_end(self, message: Message, end: int | None) -> None:
        """Raise `IllegalMove` for an end of the data that cannot be.

        Args:
            end: number of microbatches there are, as was said before; None: nobody has.
        """
        if self._pipe_of.get(message.stage) != message.pipe:
            raise IllegalMove(f"{message}: {self._me} is not there")
        steps = {self._job.step_of(of)[0] for of in (message.number, end) if of is not None}
        if end is not None and (not self._job.trains or len(steps) > 1):
            raise IllegalMove(
                f"the end was told before: {plural(end, 'microbatch')}, and now {message.number}"
            )

    def story(self, stage: int) -> str:
        """How far all work of a stage has come, as text."""
        if stage not in self._table.counters_of:
            return f"rank {self._me.rank} holds stages {sorted(self._table.counters_of)}"
        return self._table.story(stage)
