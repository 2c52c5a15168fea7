"""How long a strict order takes: the longest path through the tasks of a step."""

# A strict order says for each rank which task comes first, second, and so on. Then a task waits for
# two others at most: the one before it on its rank, and the one whose result it needs, with the way
# of that result. So the step takes as long as the longest path through these edges, and whoever
# wants a shorter step has to change that path.
#
# Tasks are numbers here, since a search looks at millions:
#
#   number = (stage * 3 + kind) * microbatches + microbatch     kind: 0 = F, 1 = I, 2 = W

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import floor, inf
from typing import NamedTuple

from ..order import Order
from ..placement import Placement
from ..simulation.costs import Costs
from ..task import Kind, Task


class Kept(NamedTuple):
    """What a rank keeps of a microbatch on one stage, in bytes or any one unit."""

    until_input: float  # what it lets go after the input gradient
    until_weight: float  # what it lets go after the weight gradient


FORWARD, INPUT, WEIGHT = 0, 1, 2
KINDS = (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT)
NONE = -1
SLACK = 1e-9  # sums of shares such as a third are not exact
Row = list[int]  # tasks of a rank, in order


@dataclass(frozen=True, slots=True)
class Graph:
    """The tasks of one step, what each takes, and what it needs."""

    placement: Placement  # placement of the stages, with one pipe
    microbatches: int  # number of microbatches of the step
    takes: tuple[float, ...]  # duration of each task
    # the task of another rank, or before on this one, whose result each task needs; NONE where
    # it needs nothing
    needs: tuple[int, ...]
    way: tuple[float, ...]  # how long that result is under way
    keeps: tuple[float, ...]  # what each task adds to what its rank keeps; below 0 where it lets go

    @classmethod
    def of(
        cls,
        placement: Placement,
        costs: Costs,
        microbatches: int,
        kept: Sequence[Kept] | None = None,
    ) -> "Graph":
        """The graph of a placement on given costs; what varies is left out.

        Args:
            placement: placement of the stages, with one pipe.
            kept: what a microbatch keeps on each stage; None: its share of a rank's layers, until
                the weight gradient.
        Raises:
            ValueError: the placement has several pipes.
        """
        if placement.pipes > 1:
            raise ValueError(f"placement {placement.name} has two pipes; expected one")
        takes: list[float] = []
        needs: list[int] = []
        way: list[float] = []
        keeps: list[float] = []
        last = placement.stages - 1
        for stage in range(placement.stages):
            slow = costs.stragglers.get(placement.rank_of(stage), 1.0)
            work = costs.of_stage(placement, stage)
            until_input, until_weight = kept[stage] if kept else (0.0, placement.share)
            keeps += [until_input + until_weight] * microbatches
            keeps += [-until_input] * microbatches + [-until_weight] * microbatches
            for kind in (FORWARD, INPUT, WEIGHT):
                source, of = _source(stage, kind, last)
                between = _way(placement, costs, source, stage)
                for microbatch in range(microbatches):
                    takes.append(costs.task + slow * work[kind])
                    at = (source * 3 + of) * microbatches + microbatch
                    needs.append(at if source != NONE else NONE)
                    way.append(between)
        return cls(placement, microbatches, tuple(takes), tuple(needs), tuple(way), tuple(keeps))

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

    def most_kept(self, row: Row) -> float:
        """The most that a rank keeps while it follows a row."""
        return max(accumulate(map(self.keeps.__getitem__, row)))

    def caps(self, limit: float) -> list[int]:
        """By rank, the number of chunks that stay within a limit, whichever they are; all of a
        step where they keep so little, or nothing."""
        stages = list(map(self.placement.stages_of, range(self.placement.ranks)))
        most = [max(self.keeps[3 * stage * self.microbatches] for stage in of) for of in stages]
        return [
            min(floor((limit + SLACK) / one), len(of) * self.microbatches)
            if one
            else len(of) * self.microbatches
            for one, of in zip(most, stages, strict=True)
        ]


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
    latency, bandwidth = costs.link(*ends)
    sent = costs.of_stage(placement, min(source, stage)).sent
    return latency + sent / bandwidth


class Path(NamedTuple):
    """What an order comes to."""

    takes: float  # duration of the steps; infinity where the order is stuck
    tasks: list[int]  # the tasks of a longest path, the last one first; [] where it is stuck


def longest_path(graph: Graph, rows: Sequence[Row], steps: int = 1) -> Path:
    """Follow an order strictly.

    Args:
        rows: for each rank its tasks, in order.
        steps: number of steps, one after the other. The third and those behind it are taken to add
            what the second adds.
    """
    ranks = range(len(rows))
    first = _follow(graph, rows, [0.0 for _ in ranks])
    if first is None:
        return Path(inf, [])
    if steps == 1:
        return Path(max(first.free), _back(rows, first, _latest(first.free)))
    second = _follow(graph, rows, first.free)
    assert second is not None  # the same order did not stick before
    one, two = max(first.free), max(second.free)
    tasks = _back(rows, second, _latest(second.free))
    begun_on = graph.placement.rank_of(tasks[-1] // graph.microbatches // 3)
    return Path(one + (steps - 1) * (two - one), tasks + _back(rows, first, begun_on))


def starts(graph: Graph, rows: Sequence[Row]) -> list[float]:
    """When each task begins, if a rank runs its next one as soon as it can; the order is not
    stuck."""
    followed = _follow(graph, rows, [0.0] * len(rows))
    assert followed is not None  # the caller knows
    return [end - takes for end, takes in zip(followed.ends, graph.takes, strict=True)]


class _Followed(NamedTuple):
    ends: list[float]  # when each task is done
    free: list[float]  # when each rank is done
    because: list[int]  # the task that each task waited for last; NONE: for nothing in this step


def _latest(free: Sequence[float]) -> int:
    return max(range(len(free)), key=free.__getitem__)


def _follow(graph: Graph, rows: Sequence[Row], begin: Sequence[float]) -> _Followed | None:
    """Run a step in which each rank begins at its time; None where it is stuck."""
    takes, needs, way = graph.takes, graph.needs, graph.way
    ends = [inf] * len(takes)
    because = [NONE] * len(takes)
    at, free, last = [0] * len(rows), list(begin), [NONE] * len(rows)
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
                    if end == inf:
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
    return None if left else _Followed(ends, free, because)


def _back(rows: Sequence[Row], followed: _Followed, rank: int) -> list[int]:
    """The path that ends with the last task of a rank."""
    path, task = [], rows[rank][-1]
    while task != NONE:
        path.append(task)
        task = followed.because[task]
    return path
