"""The buckets of a stage, and the copies of each; every rank works out the same from the list of
layers alone, but for what members of a team have of weights that are cut."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import nn

from axrt.model.layers import Layer, TiedLayerSpec, places_of, tied_layer
from axrt.scheduler.bucket import BucketCopy, Copies, copies_by_pipe

Named = list[tuple[str, nn.Parameter]]


class Share(NamedTuple):
    """What a member of a team has of the weights of its stages."""

    member: int = 0  # index of the member
    size: int = 1  # number of members
    names: Collection[str] = ()  # names of the parameters that are cut; filled as layers are built
    # True if copies share out what they step (ZeRO), so that each has norms of its own
    is_sharded: bool = False

    @property
    def counts_whole(self) -> bool:
        """Its norms of whole weights count in the norm of all gradients."""
        return self.is_sharded or self.member == 0


ALONE = Share()


class BucketSpec(NamedTuple):
    """One bucket of a stage, before its memory is allocated."""

    # places that hold the bucket, in the order in which their gradients are added up
    copies: Copies
    named: Named  # trained parameters of the bucket, each with its name here
    # names under which the user's factory gets them. Tied weights have the name that the first
    # of their layers gives them, in every copy.
    called: list[str]
    # True if its norms count in the norm of all gradients; those of tied weights count once a
    # pipe, with the first layer
    counts: bool


def buckets_of(
    layers: Sequence[Layer],
    cuts: Sequence[int],
    stage: int,
    named: Named,
    pipes: int,
    most_bytes: float,
    share: Share = ALONE,
) -> list[BucketSpec]:
    """The buckets of a stage: one for each tied layer, then the rest.

    Tied layers come first, so that other stages know the number of their buckets.

    Args:
        stage: index of the stage.
        most_bytes: largest size of an ordinary bucket, in bytes; one larger parameter has a bucket
            of its own.
        share: see `buckets_as_built`.
    Returns:
        At least one bucket: a stage without parameters has an empty one, since it has a step to
        take.
    """
    of_layers = [
        (place, [pair for pair in named if int(pair[0].partition(".")[0]) == place])
        for place in range(cuts[stage], cuts[stage + 1])
    ]
    found = dict(buckets_as_built(layers, cuts, stage, of_layers, pipes, most_bytes, share))
    return [found[number] for number in sorted(found)]


def buckets_as_built(
    layers: Sequence[Layer],
    cuts: Sequence[int],
    stage: int,
    named: Iterable[tuple[int, Named]],
    pipes: int,
    most_bytes: float,
    share: Share = ALONE,
) -> Iterator[tuple[int, BucketSpec]]:
    """The buckets of `buckets_of`, each with its index on the stage, as soon as layers are built.

    Args:
        named: for each layer of the stage in order its index and its trained parameters. The next
            layer is asked for when the buckets that are full have been taken.
        share: this member of a team, and which parameters its members have cut.
    """
    tied = _tied_places(layers, cuts, stage)
    number = len(tied)
    # A bucket has whole weights or such as are cut. Cut ones come last, and so their numbers: the
    # first member of a team has biases that others have not, and whole ones have the same number on
    # each.
    bucket, size = Named(), 0
    cut: Named = []
    for place, of_layer in named:
        rest = of_layer
        if place in tied:
            spec = _tied(layers, cuts, place, of_layer, pipes, share)
            yield tied.index(place), spec
            rest = [pair for pair in of_layer if pair not in spec.named]
        cut += [pair for pair in rest if pair[0] in share.names]
        for name, parameter in rest:
            if name in share.names:
                continue
            if bucket and size + parameter.nbytes > most_bytes:
                yield number, _ordinary(stage, number, bucket, pipes, share, is_cut=False)
                number, bucket, size = number + 1, [], 0
            bucket.append((name, parameter))
            size += parameter.nbytes
    if bucket or not number:  # a stage without parameters has a step to take, too
        yield number, _ordinary(stage, number, bucket, pipes, share, is_cut=False)
        number += 1
    bucket, size = [], 0
    for name, parameter in cut:
        if bucket and size + parameter.nbytes > most_bytes:
            yield number, _ordinary(stage, number, bucket, pipes, share, is_cut=True)
            number, bucket, size = number + 1, [], 0
        bucket.append((name, parameter))
        size += parameter.nbytes
    if bucket:
        yield number, _ordinary(stage, number, bucket, pipes, share, is_cut=True)


def _ordinary(
    stage: int, number: int, named: Named, pipes: int, share: Share, is_cut: bool
) -> BucketSpec:
    copies = (
        copies_by_pipe(stage, number, pipes, share.size, share.member)
        if is_cut
        else copies_by_pipe(stage, number, pipes)
    )
    counts = is_cut or share.counts_whole
    return BucketSpec(copies, named, [name for name, _ in named], counts)


def _tied_places(layers: Sequence[Layer], cuts: Sequence[int], stage: int) -> list[int]:
    return [
        place
        for place in range(cuts[stage], cuts[stage + 1])
        if isinstance(layers[place], TiedLayerSpec)
    ]


def _tied(
    layers: Sequence[Layer],
    cuts: Sequence[int],
    place: int,
    named: Named,
    pipes: int,
    share: Share,
) -> BucketSpec:
    layer = tied_layer(layers, place)
    places = places_of(layers, layer.key)
    buckets = [_stage_and_bucket(layers, cuts, other) for other in places]
    copies = tuple(
        BucketCopy(pipe, stage, bucket) for pipe in range(pipes) for stage, bucket in buckets
    )
    firsts = {
        f"{place}.{name}": f"{places[0]}.{first}"
        for name, first in zip(layer.tied, tied_layer(layers, places[0]).tied, strict=True)
    }
    pairs = [pair for pair in named if pair[0] in firsts]
    counts = place == places[0] and share.counts_whole
    return BucketSpec(copies, pairs, [firsts[name] for name, _ in pairs], counts)


def _stage_and_bucket(layers: Sequence[Layer], cuts: Sequence[int], place: int) -> tuple[int, int]:
    """The stage of a tied layer, and the index of its bucket there."""
    stage = next(stage for stage in range(len(cuts) - 1) if cuts[stage] <= place < cuts[stage + 1])
    return stage, _tied_places(layers, cuts, stage).index(place)
