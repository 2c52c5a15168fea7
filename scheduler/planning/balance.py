"""Cuts of a list of weights into contiguous parts, so that no rank has much more than others."""

# A rank may hold several stages. What counts is then the work of a rank, and not that of a stage.

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise, product

Stages = Sequence[Sequence[int]]  # of each rank


def balanced(weights: Sequence[float], stages: int) -> list[int]:
    """Cut weights into contiguous parts, none empty, whose largest sum is as small as it can be;
    among equal cuts, the earliest win.

    Dynamic programming over (parts, layers): stages x layers^2 comparisons.

    Args:
        weights: weight of each layer.
        stages: number of parts, at most the number of layers.
    """
    total = [0.0, *accumulate(weights)]
    n = len(weights)
    best: list[tuple[float, list[int]]] = [(total[end], [0, end]) for end in range(n + 1)]
    for parts in range(2, stages + 1):
        best = [
            min(
                (
                    (max(best[cut][0], total[end] - total[cut]), [*best[cut][1], end])
                    for cut in range(parts - 1, end)
                ),
                default=(0.0, []),
            )
            for end in range(n + 1)
        ]
    return best[n][1]


def busiest(weights: Sequence[float], cuts: Sequence[int], held: Stages) -> float:
    """The weight of the rank with most."""
    return max(_loads(weights, cuts, held))


def evened(weights: Sequence[float], cuts: Sequence[int], held: Stages) -> list[int]:
    """Move cuts, one or two at a time, as long as the rank with most gets less; among equals, as
    long as all get closer to each other.

    Args:
        weights: weight of each layer.
        cuts: where to begin.
        held: for each rank the stages that it holds.
    """

    def uneven(cuts: Sequence[int]) -> tuple[float, float]:
        loads = _loads(weights, cuts, held)
        return max(loads), sum(load * load for load in loads)

    now = list(cuts)
    while True:
        best = min(_neighbours(now, _around_the_busiest(weights, now, held)), key=uneven)
        if uneven(best) >= uneven(now):
            return now
        now = best


def _loads(weights: Sequence[float], cuts: Sequence[int], held: Stages) -> list[float]:
    total = [0.0, *accumulate(weights)]
    of_stage = [total[end] - total[first] for first, end in pairwise(cuts)]
    return [sum(of_stage[stage] for stage in stages) for stages in held]


def _around_the_busiest(weights: Sequence[float], cuts: Sequence[int], held: Stages) -> set[int]:
    loads = _loads(weights, cuts, held)
    stages = held[loads.index(max(loads))]
    return {cut for stage in stages for cut in (stage, stage + 1)} - {0, len(cuts) - 1}


def _neighbours(cuts: list[int], near: set[int]) -> Iterator[list[int]]:
    """The cuts themselves; those of which one differs; and those of which one of `near` and another
    one differ by a layer each. No stage is empty."""
    yield cuts
    inner = range(1, len(cuts) - 1)
    for one in inner:
        for at in range(cuts[one - 1] + 1, cuts[one + 1]):
            yield [*cuts[:one], at, *cuts[one + 1 :]]
    for one, other, more, less in product(sorted(near), inner, (-1, 1), (-1, 1)):
        moved = list(cuts)
        moved[one] += more
        moved[other] += less
        if all(a < b for a, b in pairwise(moved)):
            yield moved
