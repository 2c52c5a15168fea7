"""The table of work of one rank: the rows of its stages, each with what counts it."""

# `rules` make the rows. Here they become counters: every need of a row is compiled to a number that
# must have passed the row's head. On one queue that is the number of tasks started, between queues
# the number of tasks finished.

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from .bucket import Copies
from .counters import Counter, Counters, Gate, Passed
from .job import Job, StageCopy
from .message import Meaning, Message
from .rules import Feature, Need, Queue, Row, StageHere
from .rules.row import never
from .task import AnyKind, Task

UNLIMITED = sys.maxsize


class Entry:
    """A row of the table, its counters, and its head.

    Args:
        needs: numbers that must have passed its head, each with the counters that keep it.
    Attributes:
        kind: the row's kind of work.
        made: head that was asked for last; None before the first.
        takes_places: its tasks take a ticket, a place of a pool or of a stash, open a gate, or have
            joints.
        sends_at_once: the message that follows from each task is for this rank, and true as soon as
            the task has started.
    """

    __slots__ = (
        "counters",
        "kind",
        "made",
        "needs",
        "row",
        "sends_at_once",
        "stage",
        "takes_places",
    )

    def __init__(self, row: Row, counters: Counters, stage: int, needs: tuple[Passed, ...]) -> None:
        self.row, self.counters, self.stage, self.needs = row, counters, stage, needs
        self.kind = row.kind
        takes = row.by_ticket or row.takes is not None or row.stash is not None
        self.takes_places = takes or bool(row.opens) or row.joints is not None
        self.sends_at_once = False
        self.made: Task | None = None

    def head(self) -> Task:
        """The next task of the row; it is made once, however often it is looked at."""
        number, part = self.counters.count[self.kind], self.counters.part[self.kind]
        head = self.made
        if head is None or head.microbatch != number or head.part != part:
            head = self.made = Task(self.kind, self.stage, number, part)
        return head


class Scanned(NamedTuple):
    """What `RankState.pick` reads of a row each time."""

    entry: Entry  # the row
    # kind, stage: kind and stage of its tasks
    kind: AnyKind
    stage: int
    # heads, parts: numbers and parts of the heads of its counters, by kind
    heads: Mapping[Counter, int]
    parts: Mapping[AnyKind, int]
    needs: tuple[Passed, ...]  # numbers that must have passed its head


class OnceScanned(NamedTuple):
    """What `RankState.pick` reads of a row that does not count microbatches."""

    entry: Entry  # the row
    kind: AnyKind  # kind of its tasks
    heads: Mapping[Counter, int]  # numbers of the heads of its counters, by kind
    # Numbers that must have passed its head, and how many of each one task is for.
    needs: tuple[tuple[Mapping[Counter, int], Counter, int], ...]


class Inbox(NamedTuple):
    """Where messages about microbatches come in."""

    counters: Counters  # what counts them
    pipe: int  # pipe that they are addressed to
    answers: AnyKind | None  # kind of work here that they answer; None: none


class Table:
    """Rows and counters of a rank.

    Args:
        stage_copies: the stages of this rank, each with its pipe.
        copies: copies of each bucket of a stage, by stage.
        features: functions that make the rows of a stage.
    Raises:
        ValueError: two rows are of one kind and place, a row has no priority and no level, or needs
            what no row makes, or what counts steps while the row counts microbatches.
    Attributes:
        entries: all rows, in the order in which the features make them.
        queues: queues that some row runs on.
        entry_of: row of a task, by kind, stage and bucket (None: the stage's own).
        often: rows whose work may become ready at any moment, by queue.
        once: all other rows, by queue; their work becomes ready only after some event that ends a
            step, a reduction's run of microbatches or a residency.
        wakers: meanings of the messages that such rows wait for.
        inboxes: where messages about microbatches come in, by meaning and stage.
        counters_of: counters of each stage, by stage.
        buckets: counters of the buckets of a stage, by stage.
        early: kinds of work whose heads may be early.
    """

    def __init__(
        self,
        job: Job,
        stage_copies: Sequence[StageCopy],
        copies: Mapping[int, Sequence[Copies]],
        features: Sequence[Feature],
    ) -> None:
        self._job = job
        self.counters_of: dict[int, Counters] = {}
        self.buckets: dict[int, tuple[Counters, ...]] = {}
        self.entries: list[Entry] = []
        self.entry_of: dict[tuple[AnyKind, int, int | None], Entry] = {}
        self.inboxes: dict[tuple[Meaning, int], Inbox] = {}
        self._listening: dict[tuple[Counters, Counter], set[Queue]] = defaultdict(set)
        self._opening: dict[tuple[int, Gate], tuple[list[Passed], Callable[[int], int]]] = {}
        for stage_copy in stage_copies:
            here = StageHere(job, stage_copy, tuple(copies[stage_copy.stage]) if job.trains else ())
            rows = [row for feature in features for row in feature(here)]
            _check(stage_copy.stage, rows)
            self._add_counters(here)
            self._add_rows(stage_copy, rows)
        self._say_what_is_here({stage_copy.stage: stage_copy.pipe for stage_copy in stage_copies})
        self.queues = tuple(dict.fromkeys(entry.row.queue for entry in self.entries))
        self.often: dict[Queue, list[Scanned]] = {queue: [] for queue in self.queues}
        self.once: dict[Queue, list[OnceScanned]] = {queue: [] for queue in self.queues}
        for entry in self.entries:
            kind, queue = entry.kind, entry.row.queue
            if kind.of_a_microbatch:
                counters = entry.counters
                scanned = Scanned(
                    entry, kind, entry.stage, counters.count, counters.part, entry.needs
                )
                self.often[queue].append(scanned)
            else:
                counters = entry.counters
                needs = counters.numbers_of_a_task(kind)
                self.once[queue].append(OnceScanned(entry, kind, counters.count, needs))
        self.wakers = frozenset(
            need.counter
            for of in self.once.values()
            for row_once in of
            for need in row_once.entry.row.needs
            if isinstance(need.counter, Meaning)
        )
        self.early = frozenset(entry.kind for entry in self.entries if entry.row.early is not never)

    def _add_counters(self, here: StageHere) -> None:
        pipe, stage = here.stage_copy
        job, pipes = self._job, self._job.placement.pipes
        a_step = partial(job.a_step, stage=stage)
        of_replica = pipe // job.team % pipes
        counters = self.counters_of[stage] = Counters(f"stage {stage}", a_step, of_replica, pipes)
        for gate in Gate:
            counters.count_gate(gate, UNLIMITED)
        self.buckets[stage] = tuple(
            Counters(f"stage {stage} bucket {bucket}", a_step)
            for bucket in range(len(here.buckets))
        )

    def _add_rows(self, stage_copy: StageCopy, rows: Sequence[Row]) -> None:
        pipe, stage = stage_copy
        queue_of: dict[tuple[Counter, int | None], Queue] = {
            (row.kind, row.bucket): row.queue for row in rows
        }
        for row in rows:
            counters = self._counters(stage, row.bucket)
            counters.count_tasks(row.kind, row.bucket or 0)
            if row.joints is not None:
                counters.joints[row.kind] = row.joints
                counters.count_messages(row.joints.meaning, row.joints.members, None)
            for counter, senders, bucket, after in row.needs:
                needed = self._counters(stage, bucket)
                if isinstance(counter, Meaning):
                    needed.count_messages(counter, senders, after)
                    if counter.of_a_microbatch:
                        self.inboxes[counter, stage] = Inbox(needed, pipe, after)
                self._listening[needed, counter].add(row.queue)
        for row in rows:
            counters = self._counters(stage, row.bucket)
            needs = tuple([self._passed(stage, row.queue, need, queue_of) for need in row.needs])
            counters.needs[row.kind] = needs
            entry = Entry(row, counters, stage, needs)
            self.entry_of[row.kind, stage, row.bucket] = entry
            self.entries.append(entry)
        for gate, to in {opening.gate: opening.to for row in rows for opening in row.opens}.items():
            rows_that_open = [row for row in rows if gate in (one.gate for one in row.opens)]
            listening = self._listening[self.counters_of[stage], gate]
            opened_by = [
                Passed(
                    counters.count if listening <= {row.queue} else counters.finished,
                    row.kind,
                    counters,
                )
                for row in rows_that_open
                for counters in [self._counters(stage, row.bucket)]
            ]
            self._opening[stage, gate] = opened_by, to
            self.counters_of[stage].count[gate] = to(0)

    def _say_what_is_here(self, pipe_of: Mapping[int, int]) -> None:
        """Note which rows send to this rank itself, on their own queue; `pipe_of` has the pipe of
        each stage that is here."""
        for entry in self.entries:
            sends = entry.row.sends
            if sends is not None and pipe_of.get(sends.stage) == sends.pipe:
                message = Message(sends.meaning, sends.stage, 0, sends.pipe)
                is_early = not sends.meaning.for_the_host
                entry.sends_at_once = is_early and self.hears_at_once(message, entry.row)

    def _passed(
        self,
        stage: int,
        queue: Queue,
        need: Need,
        queue_of: Mapping[tuple[Counter, int | None], Queue],
    ) -> Passed:
        counters = self._counters(stage, need.bucket)
        same = queue_of.get((need.counter, need.bucket), queue) is queue
        return Passed(counters.count if same else counters.finished, need.counter, counters)

    def _counters(self, stage: int, bucket: int | None) -> Counters:
        return self.counters_of[stage] if bucket is None else self.buckets[stage][bucket]

    def all_counters(self) -> Iterator[Counters]:
        """Each stage's counters, then those of its buckets."""
        for stage, counters in self.counters_of.items():
            yield counters
            yield from self.buckets[stage]

    def counters_for(self, message: Message) -> Counters | None:
        """The counters that a message to a stage of this rank is for; None where there is no such
        bucket."""
        if not message.meaning.of_a_bucket:
            return self.counters_of[message.stage]
        buckets = self.buckets[message.stage]
        return buckets[message.bucket] if message.bucket < len(buckets) else None

    def hears_at_once(self, message: Message, row: Row) -> bool:
        """The message may count when the row's task starts: all that waits for it here runs on the
        row's own queue, behind that task."""
        counters = self.counters_for(message)
        return counters is None or self._listening[counters, message.meaning] <= {row.queue}

    def open_to(self, stage: int, gate: Gate) -> int:
        """How far the gate of a stage is open by the work that opens it."""
        opened_by, to = self._opening[stage, gate]
        return to(min(numbers[kind] for numbers, kind, _ in opened_by))

    def steps_finished(self, gate: Gate) -> int:
        """The number of steps for which all work that opens a gate has finished on this rank; any
        number where there is no such work."""
        opening = (
            passed
            for (_, of), (opened_by, _) in self._opening.items()
            if of is gate
            for passed in opened_by
        )
        return min((counters.finished[kind] for _, kind, counters in opening), default=UNLIMITED)

    def story(self, stage: int) -> str:
        """How far all work of a stage has come, as text for an error."""
        return "; ".join(
            str(counters) for counters in (self.counters_of[stage], *self.buckets[stage])
        )


def _check(stage: int, rows: Sequence[Row]) -> None:
    """Check that the rows of a stage fit together."""
    made = [(row.kind, row.bucket) for row in rows]
    opened = {opening.gate for row in rows for opening in row.opens}
    opened.add(Gate.WEIGHTS)  # an evaluation's weights are there
    for row in rows:
        name = f"row {row.kind.value} of stage {stage}"
        if (row.priority is None) == (row.level == 0):
            raise ValueError(f"{name} has a priority and a level, or neither; expected one of them")
        if made.count((row.kind, row.bucket)) > 1:
            raise ValueError(f"{name} is there twice; expected one row a kind and place")
        for counter, _, bucket, _ in row.needs:
            is_made = (
                (counter, bucket) in made
                if isinstance(counter, AnyKind)
                else not isinstance(counter, Gate) or counter in opened
            )
            if not is_made:
                raise ValueError(f"{name} needs {counter.value}, and no row makes it")
            if row.kind.of_a_microbatch and not _of_a_microbatch(counter):
                raise ValueError(
                    f"{name} counts microbatches and needs {counter.value}, which counts steps; "
                    "expected a gate, which that work opens"
                )


def _of_a_microbatch(counter: Counter) -> bool:
    return isinstance(counter, Gate) or counter.of_a_microbatch
