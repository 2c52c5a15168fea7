"""A shorter order by small changes (simulated annealing): a task of the longest path moves a few
places on its rank. What makes the step shorter is kept, and now and then also what does not."""

# Only tasks of the longest path are worth a move: all others have time to spare.

from collections.abc import Sequence
from math import exp
from random import Random

from .longest import SLACK, Graph, Path, Row, longest_path

_FURTHEST = 3  # places that a task moves at most
_HOT, _COLD = 0.5, 0.001  # of a task's mean duration


# The longest path makes plans. A task of it moves, bytes are checked, and eight steps are looked
# at: of orders that make one step equally short, some let the next one begin sooner.
def annealed(
    graph: Graph,
    rows: Sequence[Row],
    limit: float,
    moves: int,
    seed: int,
    steps: int = 1,
    least: float = 0.0,
) -> tuple[list[Row], float]:
    """Search for a shorter order near one. The same moves and seed give the same order.

    Args:
        rows: an order that is not stuck, and keeps no more than it may.
        limit: the most that a rank may keep, in the unit of the graph.
        steps: number of steps, one after the other, that are to be short.
        least: duration that no order can beat, at which the search ends.
    Returns:
        The shortest order that was found, and its duration.
    """
    random, now = Random(seed), [list(row) for row in rows]
    here = longest_path(graph, now, steps)
    best, shortest = [list(row) for row in now], here.takes
    unit = steps * sum(graph.takes) / len(graph.takes)
    rank_of = [graph.placement.rank_of(stage) for stage in range(graph.placement.stages)]
    for number in range(moves):
        if shortest <= least + SLACK:
            break
        task = random.choice(here.tasks)
        rank = rank_of[task // graph.microbatches // 3]
        row = _moved(graph, now[rank], task, random)
        if row is None or graph.most_kept(row) > limit + SLACK:
            continue
        before, now[rank] = now[rank], row
        there = longest_path(graph, now, steps)
        if _is_taken(there, here, unit * _heat(number / moves), random):
            here = there
            if here.takes < shortest:
                best, shortest = [list(of) for of in now], here.takes
        else:
            now[rank] = before
    return best, shortest


def _heat(done: float) -> float:
    return _HOT * (1 - done) + _COLD


def _is_taken(there: Path, here: Path, heat: float, random: Random) -> bool:
    longer = there.takes - here.takes
    return longer <= 0 or (heat > 0 and random.random() < exp(-longer / heat))


def _moved(graph: Graph, row: Row, task: int, random: Random) -> Row | None:
    """A row with a task at another place; None where it would leave the order of its lane, or come
    before what it needs on this rank."""
    place = row.index(task)
    to = place + random.choice((-1, 1)) * random.randint(1, _FURTHEST)
    if not 0 <= to < len(row):
        return None
    first, last = min(place, to), max(place, to)
    lane = task // graph.microbatches
    for other in row[first : last + 1]:
        if other != task and (
            other // graph.microbatches == lane
            or graph.needs[task] == other
            or graph.needs[other] == task
        ):
            return None
    moved = row[:place] + row[place + 1 :]
    moved.insert(to, task)
    return moved
