"""The buckets of a stage, and the copies of each; every rank works out the same from the list of
layers alone."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from torch import nn

from axrt.model.layers import Layer, TiedLayerSpec, places_of, tied_layer
from axrt.scheduler.bucket import BucketCopy, Copies, copies_by_pipe

Named = list[tuple[str, nn.Parameter]]


class BucketSpec(NamedTuple):
    """One bucket of a stage, before its memory is allocated.

    Args:
        copies: places that hold the bucket, in the order in which their gradients are added up.
        named: trained parameters of the bucket, each with its name here.
        called: names under which the user's factory gets them. Tied weights have the name that the
            first of their layers gives them, in every copy.
        counts: True if its norms count in the norm of all gradients; those of tied weights count
            once a pipe, with the first layer.
    """

    copies: Copies
    named: Named
    called: list[str]
    counts: bool


def buckets_of(
    layers: Sequence[Layer],
    cuts: Sequence[int],
    stage: int,
    named: Named,
    pipes: int,
    most_bytes: float,
) -> list[BucketSpec]:
    """The buckets of a stage: one for each tied layer, then the rest.

    Tied layers come first, so that other stages know the number of their buckets.

    Args:
        layers: layers of the whole model.
        cuts: indices of the layers at which stages begin, then the number of layers.
        stage: index of the stage.
        named: trained parameters of the stage, (name, parameter), in model order.
        pipes: number of pipes, over all replicas.
        most_bytes: largest size of an ordinary bucket, in bytes; one larger parameter has a bucket
            of its own.
    Returns:
        At least one bucket: a stage without parameters has an empty one, since it has a step to
        take.
    """
    tied = [_tied(layers, cuts, place, named, pipes) for place in _tied_places(layers, cuts, stage)]
    taken = {name for bucket in tied for name, _ in bucket.named}
    rest = _filled([pair for pair in named if pair[0] not in taken], most_bytes)
    if not rest and not tied:
        rest = [[]]  # a stage without parameters has a step to take, too
    ordinary = [
        BucketSpec(copies_by_pipe(stage, number, pipes), pairs, [name for name, _ in pairs], True)
        for number, pairs in enumerate(rest, len(tied))
    ]
    return tied + ordinary


def _tied_places(layers: Sequence[Layer], cuts: Sequence[int], stage: int) -> list[int]:
    return [
        place
        for place in range(cuts[stage], cuts[stage + 1])
        if isinstance(layers[place], TiedLayerSpec)
    ]


def _tied(
    layers: Sequence[Layer], cuts: Sequence[int], place: int, named: Named, pipes: int
) -> BucketSpec:
    layer = tied_layer(layers, place)
    places = places_of(layers, layer.key)
    seats = [_seat(layers, cuts, other) for other in places]
    copies = tuple(
        BucketCopy(pipe, stage, bucket) for pipe in range(pipes) for stage, bucket in seats
    )
    firsts = {
        f"{place}.{name}": f"{places[0]}.{first}"
        for name, first in zip(layer.tied, tied_layer(layers, places[0]).tied, strict=True)
    }
    pairs = [pair for pair in named if pair[0] in firsts]
    return BucketSpec(copies, pairs, [firsts[name] for name, _ in pairs], place == places[0])


def _seat(layers: Sequence[Layer], cuts: Sequence[int], place: int) -> tuple[int, int]:
    """The stage of a tied layer, and the index of its bucket there."""
    stage = next(stage for stage in range(len(cuts) - 1) if cuts[stage] <= place < cuts[stage + 1])
    return stage, _tied_places(layers, cuts, stage).index(place)


def _filled(named: Named, most_bytes: float) -> list[Named]:
    """Whole parameters in model order, a new bucket where the next would not fit."""
    buckets: list[Named] = []
    ends = accumulate(parameter.nbytes for _, parameter in named)
    begun = 0.0
    for pair, end in zip(named, ends, strict=True):
        if not buckets or end - begun > most_bytes:
            buckets.append([])
            begun = end - pair[1].nbytes
        buckets[-1].append(pair)
    return buckets
