"""An order: which task of a step each rank runs first, second, and so on; read from a file, or
taken from a policy."""

# As text it is a table of comma-separated values, one line a rank, in the notation of tasks,
# microbatches numbered within the step:
#
#   F0.0,F0.1,B0.0,B0.1
#   F1.0,B1.0,F1.1,B1.1
#
# Weight gradients may be left out: then they go wherever there is time. Lines that begin with # are
# comments. Files of torch's own schedules are read as they are, see `torch_order`.

import csv
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from .placement import PLACEMENTS, Placement, placement_by_name
from .plan import Plan
from .plural import plural
from .task import AnyKind, Kind, Task
from .torch_order import is_torch, tasks_of


@dataclass(frozen=True)
class Order:
    """A checked order."""

    placement: Placement  # placement of its stages
    microbatches: int  # number of microbatches of a step and replica
    rows: tuple[tuple[Task, ...], ...]  # tasks of one step in order, one tuple a rank

    @cached_property
    def plans(self) -> tuple[Plan, ...]:
        """The due order of each rank."""
        return tuple(map(Plan, self.rows))

    @cached_property
    def floating_plans(self) -> tuple[Plan, ...]:
        """The same, in which weight gradients go wherever there is time."""
        return tuple(Plan(row, floating=(Kind.WEIGHT,)) for row in self.rows)

    @property
    def splits(self) -> bool:
        """Backwards are split into input gradients and weight gradients."""
        return any(task.kind is Kind.INPUT for row in self.rows for task in row)

    @cached_property
    def needs(self) -> tuple[int, ...]:
        """By rank, the number of chunks that it must be able to hold so that no rank gets stuck.

        Where the order names weight gradients, a chunk counts until its weight gradient; else until
        its backward or input gradient.
        """
        return tuple(map(_most_held, self.rows))

    @cached_property
    def weights_in_turn(self) -> tuple[bool, ...]:
        """By rank, whether each weight gradient comes before the next input gradient of its
        stage."""
        return tuple(map(_has_weights_in_turn, self.rows))

    @cached_property
    def weights_by_residency(self) -> tuple[bool, ...]:
        """By rank, whether each weight gradient comes before any forward or input gradient of
        another stage."""
        return tuple(map(_has_weights_by_residency, self.rows))

    def without_weights(self) -> "Order":
        """The same order without weight gradients, which then go wherever there is time."""
        rows = tuple(
            tuple(task for task in row if task.kind is not Kind.WEIGHT) for row in self.rows
        )
        return Order(self.placement, self.microbatches, rows)

    def split(self) -> "Order":
        """The same order with each whole backward as an input gradient and a weight gradient behind
        it."""
        rows = tuple(tuple(part for task in row for part in _parts(task)) for row in self.rows)
        return Order(self.placement, self.microbatches, rows)

    def __str__(self) -> str:
        return "".join(",".join(map(str, row)) + "\n" for row in self.rows)

    @classmethod
    def parse(cls, text: str, placement: str = "", chunks: int = 0) -> "Order":
        """Read and check an order.

        Args:
            text: one line of tasks for each rank, as in the head of this file.
            placement, chunks: name of a placement, and number of stages that a rank holds; "" and
                0: the first of all placements in which every rank holds its own tasks.
        Raises:
            ValueError: the text is no order; the message names the line and what was expected
                there.
        """
        lines = [
            (number, _words(line))
            for number, line in enumerate(text.splitlines(), 1)
            if not line.startswith("#")
        ]
        lines = [(number, words) for number, words in lines if words]
        if not lines:
            raise ValueError(
                "the order is empty; expected a line of tasks for each rank, such as F0.0,B0.0"
            )
        if any(is_torch(words) for _, words in lines):
            rows = tasks_of([(number, list(filter(None, words))) for number, words in lines])
        else:
            rows = [tuple(_tasks(number, words)) for number, words in lines]
        if {Kind.BACKWARD, Kind.INPUT} <= {task.kind for row in rows for task in row}:
            raise ValueError(
                "some backwards are whole (B) and others split (I); expected one or the other"
            )
        where = _placement(rows, placement, chunks)
        microbatches = 1 + max(task.microbatch for row in rows for task in row)
        for rank, (number, _) in enumerate(lines):
            microbatches_of = {
                stage: range(where.pipe_of(rank, stage), microbatches, where.pipes)
                for stage in where.stages_of(rank)
            }
            _check(number, rows[rank], microbatches_of)
        return cls(where, microbatches, tuple(rows))


def _words(line: str) -> list[str]:
    """The cells of a line. Spreadsheets quote cells and add empty ones at the end; both are
    understood."""
    try:
        cells = [cell.strip() for row in csv.reader([line]) for cell in row]
    except csv.Error as error:
        raise ValueError(str(error)) from None
    while cells and not cells[-1]:
        cells.pop()
    return cells


def _tasks(number: int, words: list[str]) -> Iterator[Task]:
    for word in words:
        try:
            task = Task.parse(word)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
        if not task.kind.of_a_microbatch or task.kind is Kind.RECOMPUTE or task.part:
            raise ValueError(
                f"line {number}: {task}; expected forwards (F), whole backwards (B), or input and "
                "weight gradients (I, W)"
            )
        yield task


def _placement(rows: list[tuple[Task, ...]], name: str, chunks: int) -> Placement:
    """The first placement in which every rank holds the stages that its line names."""
    stages = [tuple(sorted({task.stage for task in row})) for row in rows]
    for one in (
        [placement_by_name(name, len(rows), chunks)]
        if name
        else _all_placements(len(rows), len(stages[0]))
    ):
        if [one.stages_of(rank) for rank in range(len(rows))] == stages:
            return one
    fits = f"placement {name}" if name else f"any placement ({', '.join(PLACEMENTS)})"
    raise ValueError(
        f"lines with stages {[list(of) for of in stages]} do not fit {fits}; expected first the "
        "tasks of rank 0, then those of "
        "rank 1, and so on, each with the stages that the rank holds"
    )


def _all_placements(ranks: int, chunks: int) -> Iterator[Placement]:
    for name in PLACEMENTS:
        with suppress(ValueError):  # it takes other numbers of ranks
            yield placement_by_name(name, ranks, chunks if name == "looped" else 0)


# The kind that stands before a task of a kind.
_BEFORE: dict[AnyKind, Kind] = {
    Kind.BACKWARD: Kind.FORWARD,
    Kind.INPUT: Kind.FORWARD,
    Kind.WEIGHT: Kind.INPUT,
}


def _check(number: int, row: tuple[Task, ...], microbatches_of: dict[int, range]) -> None:
    """Each kind on each stage has every microbatch of its pipe once and in order, a backward after
    its forward."""
    done: dict[tuple[AnyKind, int], int] = {}
    for task in row:
        kind, stage, microbatch, _ = task
        due = done.get((kind, stage), microbatches_of[stage].start)
        if microbatch != due:
            what = (
                "stands there twice"
                if microbatch < due
                else f"comes before {Task(kind, stage, due)}"
            )
            raise ValueError(
                f"line {number}: {task} {what}; expected each microbatch once, in order"
            )
        before = _BEFORE.get(kind)
        if (
            before is not None
            and done.get((before, stage), microbatches_of[stage].start) <= microbatch
        ):
            raise ValueError(
                f"line {number}: {task} stands before {Task(before, stage, microbatch)}; expected "
                "it after"
            )
        done[kind, stage] = due + microbatches_of[stage].step
    split = any(task.kind is Kind.INPUT for task in row)
    for stage, microbatches in microbatches_of.items():
        for kind in (
            Kind.FORWARD,
            Kind.INPUT if split else Kind.BACKWARD,
            *([Kind.WEIGHT] * any(k is Kind.WEIGHT for k, _ in done)),
        ):
            due = done.get((kind, stage), microbatches.start)
            if due in microbatches:
                raise ValueError(
                    f"line {number} ends without {Task(kind, stage, due)}; there are "
                    f"{plural(microbatches.stop, 'microbatch')}"
                )


def _parts(task: Task) -> tuple[Task, ...]:
    if task.kind is not Kind.BACKWARD:
        return (task,)
    return task._replace(kind=Kind.INPUT), task._replace(kind=Kind.WEIGHT)


def _most_held(row: tuple[Task, ...]) -> int:
    frees = {Kind.WEIGHT} & {task.kind for task in row} or {Kind.INPUT, Kind.BACKWARD}
    return max(accumulate((task.kind is Kind.FORWARD) - (task.kind in frees) for task in row))


def _has_weights_in_turn(row: tuple[Task, ...]) -> bool:
    named = any(task.kind is Kind.WEIGHT for task in row)
    waiting: set[int] = set()  # stages with a weight gradient that is to run
    for kind, stage, _, _ in row:
        if kind is Kind.WEIGHT:
            waiting.discard(stage)
        elif kind is Kind.INPUT and named:
            if stage in waiting:
                return False
            waiting.add(stage)
    return True


def _has_weights_by_residency(row: tuple[Task, ...]) -> bool:
    named = any(task.kind is Kind.WEIGHT for task in row)
    waiting: set[tuple[int, int]] = set()  # weight gradients that are to run
    for kind, stage, number, _ in row:
        if kind is Kind.WEIGHT:
            waiting.discard((stage, number))
        elif any(other != stage for other, _ in waiting):
            return False
        elif kind is Kind.INPUT and named:
            waiting.add((stage, number))
    return True
