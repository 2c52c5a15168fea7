"""Cuts of a model into stages, each held by a team of a degree of its own, that end a step soonest.

Source: Zheng et al., "Alpa", OSDI 2022, section 5.2.
"""

# A step of m microbatches takes the sum of all stages and m - 1 times the slowest one: the first
# microbatch goes through every stage, and the slowest one paces the others.
#
#   m = 4, stages of 1, 2 and 1 seconds        0 1 2 3
#                                                0 0 1 1 2 2 3 3
#                                                    0 . 1 . 2 . 3        4 + 3 x 2 = 10 seconds
#
# The sum alone is additive, so the slowest stage gets a limit, and for a limit the least sum is
# found from the last layer to the first (`_least_sum`). Alpa tries the limits in rising order, and
# stops where m - 1 times the limit alone is more than the best step. Here an interval of limits is
# halved instead. The least sum can only fall as the limit rises, so no limit of an interval gives a
# step shorter than the sum at its upper end and m - 1 times its lower end. An interval whose bound
# is over the best step is dropped unseen.
#
# Labels. Of S stages the k-th keeps min(m, S - k) microbatches, under 1f1b. Counted from the end of
# the model that does not depend on S, so one table serves all numbers of stages. What is known of
# the layers from one on, with so many ranks for them, is a list of labels: a sum and a number of
# stages. A label with fewer stages and no larger sum replaces others, since whatever stands before
# it then keeps less, too. Mostly one is left, and three where little fits.
#
# Of 96 layers on 64 ranks at degrees 1, 2, 4 and 8 that is 18,624 costs, 9 to 24 limits with a
# table each, and 3,000 to 5,500 labels a table: one to five seconds in all. Where the number of
# stages is given and degrees differ, no label replaces another one, and it takes ten.

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from math import inf, isfinite
from typing import NamedTuple


class MemberCost(NamedTuple):
    """What consecutive layers, or one layer, cost each member of the team that holds them."""

    seconds: float  # forward and backward of one microbatch; finite, 0 or more
    fixed: int  # bytes of weights, gradients and state, however many microbatches are in flight
    kept: int  # bytes of one microbatch, from its forward to its backward; 0 or more

    def bytes_of(self, microbatches: int) -> int:
        """Bytes on each member with so many microbatches in flight."""
        return self.fixed + self.kept * microbatches


class CutStage(NamedTuple):
    """Layers that are to be a stage."""

    first: int  # index of its first layer
    end: int  # index of the layer after its last one
    degree: int  # number of ranks that hold it together


class Cuts(NamedTuple):
    """A model that is cut into stages."""

    stages: tuple[CutStage, ...]  # in the order of layers
    seconds: float  # duration of a step: sum of stages and m - 1 times the slowest


CostOf = Callable[[int, int, int], MemberCost | None]


def best_cuts(
    cost_of: CostOf,
    layers: int,
    ranks: int,
    degrees: Sequence[int],
    microbatches: int,
    room: float,
    stages: int | None = None,
) -> Cuts | None:
    """Cut a model so that a step takes least; None where nothing fits.

    Stages have all layers, and their degrees add up to all ranks. Stage k of S, counted from 0,
    keeps min(microbatches, S - k) microbatches. Among steps that are as long, the one with fewest
    stages wins; among those, the one whose first stage ends earliest, then the one whose first
    stage has the lowest degree; then the second stage decides so, and so on.

    Args:
        cost_of: the cost of layers first to end - 1 as a stage of a degree, by (first, end, degree)
            and asked once for each; None: a team of that degree cannot have them.
        layers: number of layers, at least 1.
        ranks: number of ranks of a pipeline, at least 1.
        degrees: numbers of ranks that a stage may have, at least 1 each; those over `ranks` are not
            asked for. With one degree all stages have it.
        microbatches: number of microbatches of a step, at least 1.
        room: bytes that each rank has, which may be infinite.
        stages: number of stages; None: any.
    Raises:
        ValueError: a number is less than 1, or seconds are not finite.
    Source: Zheng et al. 2022, section 5.2.
    """
    if min(layers, ranks, microbatches, *degrees, 1 if stages is None else stages) < 1:
        raise ValueError(
            f"{layers} layers, {ranks} ranks, degrees {list(degrees)}, {microbatches} microbatches "
            f"and {stages} stages; expected 1 or more of each"
        )
    able = sorted({degree for degree in degrees if degree <= ranks})
    if not able:
        return None
    choices = _choices(cost_of, layers, able, microbatches, room)
    return _least_step(_Search(choices, ranks, able, stages), microbatches)


class _Choice(NamedTuple):
    """A stage that may begin at a layer."""

    end: int
    degree: int
    seconds: float
    last: int  # with how many stages from it to the end of the model, itself included, it fits


class _Label(NamedTuple):
    """One way to cut the layers from one to the last."""

    seconds: float  # sum of its stages
    stages: int  # number of them
    end: int = 0  # where its first stage ends
    degree: int = 0  # of its first stage
    slowest: float = 0.0  # seconds of its slowest stage
    rest: "_Label | None" = None  # the stages after the first


class _Search(NamedTuple):
    """What does not depend on the limit."""

    choices: Sequence[Sequence[_Choice]]  # by first layer
    ranks: int
    degrees: Sequence[int]  # in rising order
    stages: int | None

    def can_begin(self, first: int, ranks: int, stages: int) -> bool:
        """Whether so many stages from layer `first` to the end, on so many ranks, leave as many
        ranks to the layers before as these can have."""
        fewest, most = min(1, first), first
        if self.stages is not None:
            fewest, most = max(fewest, self.stages - stages), min(most, self.stages - stages)
        left = self.ranks - ranks
        return fewest <= most and fewest * self.degrees[0] <= left <= most * self.degrees[-1]


def _choices(
    cost_of: CostOf, layers: int, degrees: Sequence[int], microbatches: int, room: float
) -> list[list[_Choice]]:
    """The stages that fit somewhere, by their first layer, then by end and degree."""
    found: list[list[_Choice]] = [[] for _ in range(layers)]
    for first in range(layers):
        for end in range(first + 1, layers + 1):
            for degree in degrees:
                cost = cost_of(first, end, degree)
                if cost is None:
                    continue
                if not isfinite(cost.seconds):
                    raise ValueError(
                        f"layers {first} to {end - 1} on {degree} ranks take {cost.seconds} "
                        "seconds; expected a finite number, or no cost where that cannot be"
                    )
                if last := _last(cost, microbatches, room, layers):
                    found[first].append(_Choice(end, degree, cost.seconds, last))
    return found


def _last(cost: MemberCost, microbatches: int, room: float, layers: int) -> int:
    """With how many stages from this one to the end it fits; all of them, where every microbatch
    may be in flight; 0 where it never does."""
    if cost.bytes_of(microbatches) <= room:
        return layers
    if cost.bytes_of(1) > room:
        return 0
    return int((room - cost.fixed) // cost.kept)


def _least_step(search: _Search, microbatches: int) -> Cuts | None:
    """Search the limits of the slowest stage, the interval with the least bound first."""
    found = _least_sum(search, inf)
    if found is None:
        return None
    others = microbatches - 1
    best = _cuts(found, others)
    limits = sorted({choice.seconds for of in search.choices for choice in of})
    waiting: list[tuple[float, int, int, float]] = []

    def wait(low: int, high: int, least: float) -> None:
        # With one microbatch the limit counts for nothing, and the first answer is the last.
        if low <= high and others:
            heappush(waiting, (least + others * limits[low], low, high, least))

    wait(0, bisect_left(limits, found.slowest) - 1, found.seconds)
    # A bound that is equal may still hide a step with fewer stages.
    while waiting and waiting[0][0] <= best.seconds:
        _, low, high, least = heappop(waiting)
        middle = (low + high) // 2
        wait(middle + 1, high, least)
        found = _least_sum(search, limits[middle])
        if found is not None:
            best = min(best, _cuts(found, others), key=_rank)
            # from the slowest stage to the limit, the answer is the same
            wait(low, bisect_left(limits, found.slowest) - 1, found.seconds)
    return best


def _rank(cuts: Cuts) -> tuple[float, int, tuple[CutStage, ...]]:
    return cuts.seconds, len(cuts.stages), cuts.stages


def _cuts(label: _Label, others: int) -> Cuts:
    stages, first, rest = [], 0, label
    while rest.rest is not None:
        stages.append(CutStage(first, rest.end, rest.degree))
        first, rest = rest.end, rest.rest
    return Cuts(tuple(stages), label.seconds + others * label.slowest)


def _least_sum(search: _Search, limit: float) -> _Label | None:
    """The least sum of stages of which none takes longer than the limit; None: there are none."""
    layers = len(search.choices)
    table: list[Mapping[int, Sequence[_Label]]] = [{} for _ in range(layers)]
    table.append({0: [_Label(0.0, 0)]})
    for first in reversed(range(layers)):
        best: dict[tuple[int, int], _Label] = {}
        for choice in search.choices[first]:
            if choice.seconds <= limit:
                _extend(best, choice, table[choice.end])
        table[first] = _front(best, search, first)
    whole = table[0].get(search.ranks, ())
    return whole[-1] if whole else None


def _extend(
    best: dict[tuple[int, int], _Label],
    choice: _Choice,
    table: Mapping[int, Sequence[_Label]],
) -> None:
    """Put a stage before all that may follow it; the first of those that are equal stays."""
    end, degree, seconds, last = choice
    for taken, labels in table.items():
        ranks = taken + degree
        for label in labels:
            total, stages = seconds + label.seconds, 1 + label.stages
            known = best.get((ranks, stages))
            if stages <= last and (known is None or total < known.seconds):
                slowest = max(seconds, label.slowest)
                best[ranks, stages] = _Label(total, stages, end, degree, slowest, label)


def _front(
    best: Mapping[tuple[int, int], _Label], search: _Search, first: int
) -> Mapping[int, Sequence[_Label]]:
    """The labels by number of ranks, fewest stages first, without those that others replace; where
    the number of stages is given, none replaces others."""
    found: dict[int, list[_Label]] = {}
    for ranks, stages in sorted(best):
        label, labels = best[ranks, stages], found.setdefault(ranks, [])
        is_replaced = search.stages is None and labels and label.seconds >= labels[-1].seconds
        if not is_replaced and search.can_begin(first, ranks, stages):
            labels.append(label)
    return found
