"""How long a strict order takes: the longest path through the tasks of a step.

A strict order says for each rank which task comes first, second, and so on. Then a task waits for
two others at most: the one before it on its rank, and the one whose result it needs, with the way
of that result. So the step takes as long as the longest path through these edges, and whoever wants
a shorter step has to change that path.

Tasks are numbers here, since a search looks at millions:

    number = (stage * 3 + kind) * microbatches + microbatch     kind: 0 = F, 1 = I, 2 = W
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from .order import Order
from .placement import Placement
from .simulator import Costs
from .task import Kind, Task

FORWARD, INPUT, WEIGHT = 0, 1, 2
KINDS = (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT)
NONE = -1
Row = list[int]  # tasks of a rank, in order


@dataclass(frozen=True, slots=True)
class Graph:
    """The tasks of one step, what each takes, and what it needs.

    Args:
        placement: placement of the stages, with one pipe.
        microbatches: number of microbatches of the step.
        takes: duration of each task.
        needs: the task of another rank, or before on this one, whose result each task needs; NONE
            where it needs nothing.
        way: how long that result is under way.
    """

    placement: Placement
    microbatches: int
    takes: tuple[float, ...]
    needs: tuple[int, ...]
    way: tuple[float, ...]

    @classmethod
    def of(cls, placement: Placement, costs: Costs, microbatches: int) -> "Graph":
        """The graph of a placement on given costs; what varies is left out.

        Raises:
            ValueError: the placement has several pipes.
        """
        if placement.pipes > 1:
            raise ValueError(f"placement {placement.name} has two pipes; expected one")
        takes: list[float] = []
        needs: list[int] = []
        way: list[float] = []
        last = placement.stages - 1
        for stage in range(placement.stages):
            slow = costs.stragglers.get(placement.rank_of(stage), 1.0)
            work = costs.of_stage(placement, stage)
            for kind in (FORWARD, INPUT, WEIGHT):
                source, of = _source(stage, kind, last)
                between = _way(placement, costs, source, stage)
                for microbatch in range(microbatches):
                    takes.append(costs.task + slow * work[kind])
                    at = (source * 3 + of) * microbatches + microbatch
                    needs.append(at if source != NONE else NONE)
                    way.append(between)
        return cls(placement, microbatches, tuple(takes), tuple(needs), tuple(way))

    def task(self, number: int) -> Task:
        """The task of a number."""
        lane, microbatch = divmod(number, self.microbatches)
        stage, kind = divmod(lane, 3)
        return Task(KINDS[kind], stage, microbatch)

    def number(self, task: Task) -> int:
        """The number of a task."""
        kind = KINDS.index(task.kind)
        return (task.stage * 3 + kind) * self.microbatches + task.microbatch

    def order(self, rows: Iterable[Row]) -> Order:
        """Rows as an order."""
        tasks = tuple(tuple(map(self.task, row)) for row in rows)
        return Order(self.placement, self.microbatches, tasks)

    def rows(self, order: Order) -> list[Row]:
        """An order with weight gradients as rows."""
        return [list(map(self.number, row)) for row in order.rows]


def _source(stage: int, kind: int, last: int) -> tuple[int, int]:
    """The stage and the kind of what a task needs."""
    if kind == FORWARD:
        return stage - 1, FORWARD
    if kind == WEIGHT:
        return stage, INPUT
    return (stage, FORWARD) if stage == last else (stage + 1, INPUT)


def _way(placement: Placement, costs: Costs, source: int, stage: int) -> float:
    if source in (NONE, stage):
        return 0.0
    ends = placement.rank_of(source), placement.rank_of(stage)
    if ends[0] == ends[1]:
        return 0.0
    latency, bandwidth = costs.edges.get(ends, costs.edge)
    sent = costs.of_stage(placement, min(source, stage)).sent
    return latency + sent / bandwidth


class Path(NamedTuple):
    """What an order comes to.

    Args:
        takes: duration of the step; infinity where the order is stuck.
        tasks: the tasks of a longest path, the last one first; [] where it is stuck.
    """

    takes: float
    tasks: list[int]


def longest_path(graph: Graph, rows: Sequence[Row]) -> Path:
    """Follow an order strictly.

    Args:
        graph: tasks of a step.
        rows: for each rank its tasks, in order.
    """
    takes, needs, way = graph.takes, graph.needs, graph.way
    ends: list[float | None] = [None] * len(takes)
    because = [NONE] * len(takes)
    at, free, last = [0] * len(rows), [0.0] * len(rows), [NONE] * len(rows)
    left, moves = sum(map(len, rows)), True
    while left and moves:
        moves = False
        for rank, row in enumerate(rows):
            place, now, before = at[rank], free[rank], last[rank]
            first = place
            while place < len(row):
                task = row[place]
                needed = needs[task]
                because[task] = before
                if needed != NONE:
                    end = ends[needed]
                    if end is None:
                        break
                    comes = end + way[task]
                    if comes > now:
                        now, because[task] = comes, needed
                now += takes[task]
                ends[task] = now
                before = task
                place += 1
            if place > first:
                at[rank], free[rank], last[rank] = place, now, before
                left -= place - first
                moves = True
    if left:
        return Path(inf, [])
    latest = max(range(len(rows)), key=free.__getitem__)
    path, task = [], last[latest]
    while task != NONE:
        path.append(task)
        task = because[task]
    return Path(free[latest], path)
