"""Orders with one forward and one input gradient in turns, whose weight gradients come the later
the deeper the rank is. Then a rank that waits for its first microbatch has weight gradients left at
the end, where others wait for its input gradients."""

# With as many forwards at the start as ranks are behind, that is ZB-H1; with twice as many, ZB-H2.
# In between lie those for messages that take long.
#
# Source of the idea: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024 (ZB-H1, ZB-H2).

from collections.abc import Iterator
from itertools import islice
from math import ceil

from .longest import FORWARD, INPUT, WEIGHT, Graph, Row

_SLOPES = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0)  # forwards at the start, more for each rank behind


# Weight gradients come the later the deeper the rank in some of the orders that a search begins
# with. From 1f1b it found 1,321 where ZB-H1 takes 1,310 ms, and from these it finds 1,310.
def delayed(graph: Graph, limit: float) -> Iterator[list[Row]]:
    """Such orders, on linear placement; none on others.

    Args:
        limit: the most that a rank may keep, in the unit of the graph.
    """
    if graph.placement.name != "linear":
        return
    ranks = graph.placement.ranks
    caps = graph.caps(limit)
    for slope in _SLOPES:
        behind = [ceil(slope * (ranks - 1 - rank)) for rank in range(ranks)]
        warm = [max(1, min(cap, 1 + more)) for cap, more in zip(caps, behind, strict=True)]
        yield [
            _row(graph, rank, first, cap - first)
            for rank, (first, cap) in enumerate(zip(warm, caps, strict=True))
        ]


def _row(graph: Graph, rank: int, warm: int, delay: int) -> Row:
    """Forwards to start with, then turns; a weight gradient once more than `delay` wait."""
    left = {
        kind: iter(range(lane := (rank * 3 + kind) * graph.microbatches, lane + graph.microbatches))
        for kind in (FORWARD, INPUT, WEIGHT)
    }
    row = list(islice(left[FORWARD], warm))
    for number, task in enumerate(left[INPUT]):
        forwards = list(islice(left[FORWARD], 1))
        weights = islice(left[WEIGHT], 1 if number >= delay or not forwards else 0)
        row += [task, *weights, *forwards]
    return [*row, *left[WEIGHT]]
