"""The layout of each layer of a stage: how its team shares the work of a microbatch."""

# A layer has a cost in each layout that it may take, and a joint between two layers has one for
# each pair of theirs. The quickest choice is a shortest path: one node for each layer and layout,
# one edge for each joint.
#
#              layer 0        layer 1        layer 2
#   columns       2 ------------ 2              9        2 + 2 + 3 + 1 = 8 seconds,
#                                  `--- 3 ---.           of which 3 at the joint
#   samples       5              5              1
#
# Where the quickest path has too many bytes, each node has all pairs of seconds and bytes of the
# layers from it on, without those that another one equals or beats in both. Pairs that do not fit,
# even with the fewest bytes of all layers before, are dropped at once. Layers that are alike give
# few pairs: of n such layers with two layouts there are n + 1 numbers of bytes. Layers that all
# differ may double the pairs one by one, as in any knapsack.

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import inf
from typing import NamedTuple

from .cuts import MemberCost


class Layouts(NamedTuple):
    """The layouts of the layers of a stage."""

    names: tuple[str, ...]  # of each layer
    cost: MemberCost  # of all layers, and of the joints between them


class _Label(NamedTuple):
    """One way to lay out the layers from one to the last."""

    seconds: float
    held: int  # bytes on each member
    name: str | None = None  # layout of its first layer; None: it has no layers
    rest: "_Label | None" = None  # the layers after the first


_Between = Callable[[int, str, str], float]
_Fronts = Mapping[str | None, Sequence[_Label]]  # by layout; with more seconds come fewer bytes


def best_layouts(
    costs: Sequence[Mapping[str, MemberCost]],
    between: _Between,
    in_flight: int = 1,
    room: float = inf,
) -> Layouts | None:
    """Choose the layouts of a stage that take least of those that fit; None where none fits.

    Among equal seconds those with fewest bytes win. Among those, the first layer whose layouts
    differ decides, and the layout wins that its mapping has first.

    Args:
        costs: for each layer, what it costs in each layout that it may take.
        between: seconds of a microbatch, forward and backward, at the joint after a layer, from the
            layout of that layer to that of the next one; infinite where they do not go together.
        in_flight: number of microbatches that the stage keeps, 0 or more.
        room: bytes that each member has for these layers, which may be infinite.
    Source: Zheng et al., "Alpa", OSDI 2022, section 4.2. Its integer program is a path here, since
        layers follow each other.
    """
    # Most stages end here, with one pair a node.
    quickest = _laid_out(costs, between, in_flight, inf)
    if quickest is None or quickest.cost.bytes_of(in_flight) <= room:
        return quickest
    return _laid_out(costs, between, in_flight, room)


def _laid_out(
    costs: Sequence[Mapping[str, MemberCost]], between: _Between, in_flight: int, room: float
) -> Layouts | None:
    fewest = (min((cost.bytes_of(in_flight) for cost in of.values()), default=0) for of in costs)
    before = [0, *accumulate(fewest)]  # of all layers before one
    after: _Fronts = {None: [_Label(0.0, 0)]}
    for place in reversed(range(len(costs))):
        after = {
            name: _front(
                _ways(place, name, cost.seconds, cost.bytes_of(in_flight), between, after),
                room - before[place],
            )
            for name, cost in costs[place].items()
        }
    quickest = [label for front in after.values() for label in front[:1]]
    if not quickest:
        return None
    return _layouts(costs, min(quickest, key=_seconds_and_bytes))


def _ways(
    place: int, name: str, seconds: float, held: int, between: _Between, after: _Fronts
) -> Iterator[_Label]:
    """A layer in a layout before all ways to lay out the layers after it."""
    for other, labels in after.items():
        with_joint = seconds if other is None else seconds + between(place, name, other)
        for label in labels:
            yield _Label(with_joint + label.seconds, held + label.held, name, label)


def _front(ways: Iterable[_Label], room: float) -> list[_Label]:
    """Those that fit, and that no other one equals or beats in both seconds and bytes; where there
    is room for all, the quickest of them."""
    front: list[_Label] = []
    # Sorting keeps the order of those that are equal: what mappings have first stays first.
    for label in sorted(ways, key=_seconds_and_bytes):
        fits = label.seconds < inf and label.held <= room
        if fits and (not front or label.held < front[-1].held):
            front.append(label)
    return front[:1] if room == inf else front


def _seconds_and_bytes(label: _Label) -> tuple[float, int]:
    return label.seconds, label.held


def _layouts(costs: Sequence[Mapping[str, MemberCost]], label: _Label) -> Layouts:
    names: list[str] = []
    seconds = label.seconds
    while label.name is not None and label.rest is not None:
        names.append(label.name)
        label = label.rest
    chosen = [of[name] for of, name in zip(costs, names, strict=True)]
    fixed = sum(cost.fixed for cost in chosen)
    kept = sum(cost.kept for cost in chosen)
    return Layouts(tuple(names), MemberCost(seconds, fixed, kept))
