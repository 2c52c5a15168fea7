"""An order made for given costs, task by task (list scheduling): of all tasks that may run, the one
that can start first is put behind its rank's others."""

# Of those that can start at the same time an input gradient comes first, since other ranks wait for
# it, then a forward, and a weight gradient fills the time that is left.

from math import inf

from .longest import FORWARD, INPUT, NONE, SLACK, WEIGHT, Graph, Row


def list_schedule(graph: Graph, limit: float, *, deepest_first: bool = True) -> list[Row]:
    """Make an order.

    Args:
        limit: the most that a rank may keep, in the unit of the graph; enough for one microbatch on
            all its stages.
        deepest_first: True if of two forwards that can start at once the one of the deeper stage
            comes first, False for the other one.
    Raises:
        ValueError: no order holds so little.
    """
    return _Builder(graph, limit, deepest_first).rows()


class _Builder:
    def __init__(self, graph: Graph, limit: float, deepest_first: bool) -> None:
        self._graph, self._limit, self._deepest = graph, limit + SLACK, deepest_first
        self._ends = [inf] * len(graph.takes)
        placement = graph.placement
        self._stages = [placement.stages_of(rank) for rank in range(placement.ranks)]
        self._done = [[0, 0, 0] for _ in range(placement.stages)]
        self._free = [0.0] * placement.ranks
        self._kept = [0.0] * placement.ranks

    def rows(self) -> list[Row]:
        rows: list[Row] = [[] for _ in self._stages]
        for _ in self._graph.takes:
            found = [(*one, rank) for rank in range(len(rows)) if (one := self._next(rank))]
            if not found:
                raise ValueError("no order of these tasks holds so little")
            start, _, task, rank = min(found)
            rows[rank].append(task)
            self._run(task, start, rank)
        return rows

    def _run(self, task: int, start: float, rank: int) -> None:
        self._free[rank] = self._ends[task] = start + self._graph.takes[task]
        stage, kind = divmod(task // self._graph.microbatches, 3)
        self._done[stage][kind] += 1
        self._kept[rank] += self._graph.keeps[task]

    def _next(self, rank: int) -> tuple[float, tuple[int, int], int] | None:
        """The task that a rank would run next: when it can start, its priority, and its number."""
        found = []
        for depth, stage in enumerate(self._stages[rank]):
            order = -depth if self._deepest else depth
            for kind in (INPUT, FORWARD, WEIGHT):
                task = self._head(stage, kind)
                if task is None or (kind == FORWARD and not self._has_room(rank, depth)):
                    continue
                start = self._start(task, rank)
                if start < inf:
                    found.append((start, (_PRIORITY[kind], order), task))
        return min(found) if found else None

    def _head(self, stage: int, kind: int) -> int | None:
        done = self._done[stage]
        if done[kind] >= (self._graph.microbatches if kind == FORWARD else done[kind - 1]):
            return None
        return (stage * 3 + kind) * self._graph.microbatches + done[kind]

    def _has_room(self, rank: int, depth: int) -> bool:
        """A rank keeps a place for each deeper stage that it holds: only those free the others."""
        lanes = [stage * 3 * self._graph.microbatches for stage in self._stages[rank][depth:]]
        return self._kept[rank] + sum(map(self._graph.keeps.__getitem__, lanes)) <= self._limit

    def _start(self, task: int, rank: int) -> float:
        needed = self._graph.needs[task]
        comes = 0.0 if needed == NONE else self._ends[needed] + self._graph.way[task]
        return max(comes, self._free[rank])


_PRIORITY = {INPUT: 0, FORWARD: 1, WEIGHT: 2}
