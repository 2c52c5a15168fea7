"""What varies in a run, taken from its timeline: jitter, which each task has of its own, and
lengths, which a microbatch has on all stages."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import log
from statistics import fmean, pvariance, stdev

from ..task import AnyKind, Kind
from .timeline import Timeline

_ALIKE = (Kind.FORWARD, Kind.INPUT)  # whole backwards are sums, and vary less
_SHORTEST_S = 1e-9

# By kind and stage, the seconds of each microbatch, by rank and number.
Durations = Mapping[tuple[AnyKind, int], Mapping[tuple[int, int], float]]
_Lane = dict[int, float]  # the logarithms of a rank's durations of one kind and stage, by number


def durations(line: Timeline) -> Durations:
    """The duration of each microbatch, its pieces together. A kind and stage that did not run has
    none."""
    took: dict[tuple[AnyKind, int], dict[tuple[int, int], float]]
    took = defaultdict(lambda: defaultdict(float))
    for rank, (kind, stage, number, _), start, end in line.computing():
        took[kind, stage][rank, number] += end - start
    return took


# A run tells lengths from jitter by what forwards and input gradients of a microbatch share on all
# stages (`variation.py`), since orders bear the two differently.
def variation(took: Durations, ranks: int, microbatches: int) -> tuple[float, float]:
    """Sigmas of jitter and of lengths, see `Costs`."""
    lanes: dict[tuple[AnyKind, int, int], _Lane] = defaultdict(dict)
    for (kind, stage), of in took.items():
        if kind in _ALIKE:
            for (rank, number), seconds in of.items():
                lanes[kind, stage, rank][number] = log(max(seconds, _SHORTEST_S))
    variance = fmean([pvariance(lane.values()) for lane in lanes.values()] or [0.0])
    shared = min(variance, _shared(lanes, ranks, microbatches))
    return (variance - shared) ** 0.5, shared**0.5


def _shared(
    lanes: Mapping[tuple[AnyKind, int, int], _Lane], ranks: int, microbatches: int
) -> float:
    """The covariance of what two ranks take for a microbatch; 0 where chance could have made it."""
    apart: dict[tuple[int, int], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for (_, _, rank), lane in lanes.items():
        for number, one in _within_steps(lane, microbatches):
            apart[rank // ranks, number][rank].append(one)
    found = [_covariance(list(of.values())) for of in apart.values() if len(of) > 1]
    if len(found) < 2:
        return 0.0
    by_chance = 2 * stdev(found) / len(found) ** 0.5
    return fmean(found) if fmean(found) > by_chance else 0.0


def _within_steps(lane: _Lane, microbatches: int) -> Iterator[tuple[int, float]]:
    """How far each is from the mean of its step: in a slow step all are late, whatever their
    length."""
    of_step: dict[int, list[float]] = defaultdict(list)
    for number, one in lane.items():
        of_step[number // microbatches].append(one)
    for number, one in lane.items():
        of = of_step[number // microbatches]
        if len(of) > 1:  # scaled, since each moves the mean of its own step
            yield number, (one - fmean(of)) * (len(of) / (len(of) - 1)) ** 0.5


def _covariance(by_rank: Sequence[Sequence[float]]) -> float:
    """That of two ranks, averaged over all pairs of their tasks. A rank's own noise may last from
    one task to the next, so pairs of one rank do not count."""
    pairs = sum(map(len, by_rank)) ** 2 - sum(len(of) ** 2 for of in by_rank)
    products = sum(map(sum, by_rank)) ** 2 - sum(sum(of) ** 2 for of in by_rank)
    return products / pairs
