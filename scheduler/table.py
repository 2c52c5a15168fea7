"""The table of work of one rank: the rows of its stages, each with the lane that counts it.

`rules` make the rows. Here they become counters: every need of a row is compiled to a number that
must have passed the row's head. On one queue that is the number of tasks started, between queues
the number of tasks finished.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from .bucket import Copies
from .job import Job, Seat
from .lane import Counter, Gate, Lane, Passed
from .message import Meaning, Message
from .rules import Feature, Need, Queue, Row, StageHere
from .rules.row import never
from .task import AnyKind, Task

UNLIMITED = sys.maxsize


class Entry(NamedTuple):
    """A row of the table, and the lane that counts it.

    Args:
        row: row of the table.
        lane: lane that counts the row's tasks.
        stage: stage that the lane belongs to.
        kind: the row's kind of work.
        needs: numbers that must have passed its head, each with the lane that keeps it.
    """

    row: Row
    lane: Lane
    stage: int
    kind: AnyKind
    needs: tuple[Passed, ...]

    def head(self) -> Task:
        """The next task of the row."""
        return self.lane.head(self.row.kind, self.stage)


class Table:
    """Rows and lanes of a rank.

    Args:
        job: schedule of the run.
        seats: the stages of this rank, each with its pipe.
        copies: copies of each bucket of a stage, by stage.
        features: functions that make the rows of a stage.
    Raises:
        ValueError: two rows are of one kind and place, or a row needs what no row makes, or what
            counts steps while the row counts microbatches.
    Attributes:
        entries: all rows, in the order in which the features make them.
        queues: queues that some row runs on.
        often: rows whose work may become ready at any moment, by queue.
        once: all other rows, by queue; their work becomes ready only after some event that ends a
            step, a reduction's run of microbatches or a stay.
        wakers: meanings of the messages that such rows wait for.
        lanes: lane of each stage, by stage.
        buckets: lanes of the buckets of a stage, by stage.
        early: kinds of work whose heads may be early.
    """

    def __init__(
        self,
        job: Job,
        seats: Sequence[Seat],
        copies: Mapping[int, Sequence[Copies]],
        features: Sequence[Feature],
    ) -> None:
        self._job = job
        self.lanes: dict[int, Lane] = {}
        self.buckets: dict[int, tuple[Lane, ...]] = {}
        self.entries: list[Entry] = []
        self._entry_of: dict[tuple[object, int, int | None], Entry] = {}
        self._listening: dict[tuple[Lane, Counter], set[Queue]] = defaultdict(set)
        self._opening: dict[tuple[int, Gate], tuple[list[Passed], Callable[[int], int]]] = {}
        for seat in seats:
            here = StageHere(job, seat, tuple(copies[seat.stage]) if job.trains else ())
            rows = [row for feature in features for row in feature(here)]
            _check(seat.stage, rows)
            self._add_lanes(here)
            self._add_rows(seat.stage, rows)
        self.queues = tuple(dict.fromkeys(entry.row.queue for entry in self.entries))
        self.often: dict[Queue, list[Entry]] = {queue: [] for queue in self.queues}
        self.once: dict[Queue, list[Entry]] = {queue: [] for queue in self.queues}
        for entry in self.entries:
            of = self.often if entry.row.kind.of_a_microbatch else self.once
            of[entry.row.queue].append(entry)
        self.wakers = frozenset(
            need.counter
            for of in self.once.values()
            for entry in of
            for need in entry.row.needs
            if isinstance(need.counter, Meaning)
        )
        self.early = frozenset(entry.kind for entry in self.entries if entry.row.early is not never)

    def _add_lanes(self, here: StageHere) -> None:
        pipe, stage = here.seat
        job, pipes = self._job, self._job.placement.pipes
        a_step = partial(job.a_step, stage=stage)
        lane = self.lanes[stage] = Lane(f"stage {stage}", a_step, pipe % pipes, pipes)
        for gate in Gate:
            lane.count_gate(gate, UNLIMITED)
        self.buckets[stage] = tuple(
            Lane(f"stage {stage} bucket {bucket}", a_step) for bucket in range(len(here.buckets))
        )

    def _add_rows(self, stage: int, rows: Sequence[Row]) -> None:
        queue_of: dict[tuple[Counter, int | None], Queue] = {
            (row.kind, row.bucket): row.queue for row in rows
        }
        for row in rows:
            lane = self._lane(stage, row.bucket)
            lane.count_tasks(row.kind, row.bucket or 0)
            for counter, senders, bucket, after in row.needs:
                needed = self._lane(stage, bucket)
                if isinstance(counter, Meaning):
                    needed.count_messages(counter, senders, after)
                self._listening[needed, counter].add(row.queue)
        for row in rows:
            lane = self._lane(stage, row.bucket)
            needs = tuple([self._passed(stage, row.queue, need, queue_of) for need in row.needs])
            lane.needs[row.kind] = needs
            entry = Entry(row, lane, stage, row.kind, needs)
            self._entry_of[row.kind, stage, row.bucket] = entry
            self.entries.append(entry)
        for gate, to in {opening.gate: opening.to for row in rows for opening in row.opens}.items():
            rows_that_open = [row for row in rows if gate in (one.gate for one in row.opens)]
            listening = self._listening[self.lanes[stage], gate]
            opened_by = [
                Passed(lane.count if listening <= {row.queue} else lane.finished, row.kind, lane)
                for row in rows_that_open
                for lane in [self._lane(stage, row.bucket)]
            ]
            self._opening[stage, gate] = opened_by, to
            self.lanes[stage].count[gate] = to(0)

    def _passed(
        self,
        stage: int,
        queue: Queue,
        need: Need,
        queue_of: Mapping[tuple[Counter, int | None], Queue],
    ) -> Passed:
        lane = self._lane(stage, need.bucket)
        same = queue_of.get((need.counter, need.bucket), queue) is queue
        return Passed(lane.count if same else lane.finished, need.counter, lane)

    def _lane(self, stage: int, bucket: int | None) -> Lane:
        return self.lanes[stage] if bucket is None else self.buckets[stage][bucket]

    def all_lanes(self) -> Iterator[Lane]:
        """Each stage's lane, then those of its buckets."""
        for stage, lane in self.lanes.items():
            yield lane
            yield from self.buckets[stage]

    def entry_of(self, task: Task) -> Entry | None:
        """The row of a task; None where this rank has none."""
        bucket = task.part if task.kind.of_a_bucket else None
        return self._entry_of.get((task.kind, task.stage, bucket))

    def lane_of(self, message: Message) -> Lane | None:
        """The lane that a message to a stage of this rank is for; None where there is no such
        bucket."""
        if not message.meaning.of_a_bucket:
            return self.lanes[message.stage]
        buckets = self.buckets[message.stage]
        return buckets[message.bucket] if message.bucket < len(buckets) else None

    def hears_at_once(self, message: Message, row: Row) -> bool:
        """The message may count when the row's task starts: all that waits for it here runs on the
        row's own queue, behind that task."""
        lane = self.lane_of(message)
        return lane is None or self._listening[lane, message.meaning] <= {row.queue}

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
        return min((lane.finished[kind] for _, kind, lane in opening), default=UNLIMITED)

    def story(self, stage: int) -> str:
        """How far all work of a stage has come, as text for an error."""
        return "; ".join(str(lane) for lane in (self.lanes[stage], *self.buckets[stage]))


def _check(stage: int, rows: Sequence[Row]) -> None:
    """Check that the rows of a stage fit together."""
    made = [(row.kind, row.bucket) for row in rows]
    opened = {opening.gate for row in rows for opening in row.opens}
    opened.add(Gate.WEIGHTS)  # an evaluation's weights are there
    for row in rows:
        name = f"row {row.kind.value} of stage {stage}"
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
