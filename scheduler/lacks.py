"""Why a rank is idle: which heads may not run, what each lacks, and which rank owes that."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from .counters import Counter, Counters, Gate
from .job import Job
from .message import Meaning
from .resources import Resources
from .rules import Row
from .rules.row import always
from .running import Running
from .table import Entry, Table
from .task import Kind, Task
from .tickets import Which

# Why a rank is idle: nothing has come, a task has begun that lacks slices of other members, the
# policy says no, state is on its way, nothing is left.
CAUSES = INPUT, SLICES, ROOM, COPIES, END = "input", "slices", "room", "copies", "end"

_WHOLE_WEIGHTS = (Gate.FORWARDS, Gate.RECOMPUTES, Gate.BACKWARDS)  # where they come for a residency
_SLICES = (Meaning.SLICE, Meaning.SLICE_BACK)
_ON_HOST = (Kind.UNLOAD, Kind.HOST_STEP, Kind.LOAD)  # a step on the host, and the ways there


Admits = Callable[[Row, Task], bool]


class Coordinates(NamedTuple):
    """The replica of a rank, and its place in it."""

    replica: int
    rank: int  # index within the pipeline; of a team, members stand one after the other

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


class Diagnosis:
    """What keeps one rank from going on.

    Args:
        groups: places of the ranks of the group of each bucket here, by stage and bucket.
    """

    def __init__(
        self,
        job: Job,
        me: Coordinates,
        table: Table,
        running: Running,
        resources: Resources,
        groups: Mapping[Which, tuple[tuple[int, int], ...]],
    ) -> None:
        self._job, self._me, self._table = job, me, table
        self._running, self._resources = running, resources
        self._groups = groups

    def waiting_for(self, wanted: int, admits: Admits) -> list[Lack]:
        """For every head that was asked for and may not run now: what it lacks, and which rank owes
        it.

        Args:
            wanted: number of microbatches that were asked for, and exist.
            admits: function that says whether the policy, and the device's memory, let a head run.
        """
        lacks: list[Lack] = []
        for entry in self._table.entries:
            head = entry.head()
            if self._job.first_for(*head[:3]) < wanted:
                lacks += self._lacks_of(entry, head, admits)
        return lacks + [lack for task in self._running.tasks for lack in self._others_in(task)]

    def _lacks_of(self, entry: Entry, head: Task, admits: Admits) -> list[Lack]:
        missing = [
            Lack(head, _named(counter), self._owner(counters, counter))
            for counters, counter in entry.counters.missing(head.kind)
        ]
        if missing:
            return missing
        row = entry.row
        if not (row.fills or admits(row, head)):
            return [Lack(head, ROOM, None)]
        if not self._resources.may_go(row, head):
            return [self._earlier_ticket(entry, head)]
        if not self._resources.has_place(row):
            assert row.takes is not None
            return [Lack(head, f"a {row.takes.value}", None)]
        return []

    def why_idle(self, asked: int, finished: bool) -> str:
        """The cause of an idle rank, one of `CAUSES`.

        Args:
            asked: number of microbatches that were asked for.
            finished: all of them are done here.
        """
        if self._waits_at_joint():
            return SLICES
        for entry in self._table.entries:
            row, counters, kind = entry.row, entry.counters, entry.kind
            if row.fills or (row.level == 0 and row.admitted is always):
                continue
            first = self._job.first_for(kind, entry.stage, counters.count[kind])
            if first < asked and counters.is_ready(kind):
                return ROOM
        if self._waits_for_copies():
            return COPIES
        return END if finished else INPUT

    def _waits_at_joint(self) -> bool:
        """A task has begun whose next piece lacks slices."""
        return any(
            counter in _SLICES
            for entry in (self._table.entries if self._job.joints else ())
            if entry.head().part > 0
            for _, counter in entry.counters.missing(entry.kind)
        )

    def _waits_for_copies(self) -> bool:
        """A step, a forward or a backward lacks nothing but what is on its way; or a
        step on the host is under way."""
        entries = self._table.entries
        missing = [{counter for _, counter in of.counters.missing(of.kind)} for of in entries]
        if any({copy} in missing for copy in (Kind.FETCH, Kind.RELOAD)):
            return True
        if self._job.offloads_weights and any({gate} in missing for gate in _WHOLE_WEIGHTS):
            return True
        waits = any(of.kind is Kind.UNLOAD and of.counters.is_ready(of.kind) for of in entries)
        return waits or any(task.kind in _ON_HOST for task in self._running.tasks)

    def _earlier_ticket(self, entry: Entry, head: Task) -> Lack:
        """The lack of a task whose ticket is known, and not the one before it."""
        if entry.row.in_order:
            return Lack(head, "the residency before it", None)
        (needed,) = entry.needs
        return Lack(head, Meaning.TICKET.value, self._owner(needed.counters, Meaning.TICKET))

    def _others_in(self, task: Task) -> list[Lack]:
        """The ranks that a collective under way needs: it ends when all of them have joined."""
        entry, _, _ = self._running.tasks[task]
        if not entry.row.by_ticket:
            return []
        return [
            Lack(task, "its end", Coordinates(*place))
            for place in self._groups[task.stage, task.part]
            if place != self._me
        ]

    def _owner(self, counters: Counters, counter: Counter) -> Coordinates | None:
        """The coordinates of the rank that owes the next of what is counted; None for this rank."""
        stage_copy = counters.owner(counter)
        place = None if stage_copy is None else Coordinates(*self._job.place_of(*stage_copy))
        return None if place == self._me else place


def _named(counter: Counter) -> str:
    """What of a counter has not come, in words."""
    return f"a {counter.value}" if counter in _SLICES else counter.value
