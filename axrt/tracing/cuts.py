"""Where a graph may be cut into layers: between two uses of weights, where least is alive."""

# A cut lies between two steps that read weights, since a layer without weights would be a message
# for nothing. Of all places between the two it is the one with the fewest bytes alive, the last one
# of several: what needs no weight stays with what it follows.
#
# Then cuts go that cost more than cuts on both sides of them: inside attention queries, keys,
# values and the residual are alive, before and behind it the residual alone. A layer that would
# have more than `_MOST` of all operations stays cut, so that a U-Net, in whose middle all skips are
# alive, and small models can be shared out too.
#
# The graph for evaluation is another one. It is cut between the same uses of weights, where least
# is alive in it; a cut that it cannot have is none.

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from torch import Tensor
from torch.fx import Node

from .program import Program, has_known_size

_MOST = 0.125  # of a model's operations, in a layer that was made of several
Use = tuple[str, int]  # a weight, and which of its uses this is


class Cut(NamedTuple):
    """A place at which a layer may begin."""

    cost: int  # bytes alive
    place: int  # index of the step in the graph for training
    in_evaluation: int


def cuts_of(
    training: Program, evaluation: Program, operations: Mapping[Node, int]
) -> tuple[list[int], list[int]]:
    """The indices of the steps before which layers begin, but for the first layer, in both graphs.

    Args:
        operations: floating-point operations of steps of the training graph, where there are some.
    """
    uses, others = _uses(training), _uses(evaluation)
    found: list[Cut] = []
    for (_, last), (first, _) in pairwise(_indices(uses)):
        place = _cheapest(training, last + 1, first)
        if place is None:
            continue
        before = {use for index, of in uses.items() if index < place[1] for use in of}
        behind = {use for index, of in uses.items() if index >= place[1] for use in of}
        other = _place_between(evaluation, others, before, behind)
        if other is not None:
            found.append(Cut(*place, other))
    kept = _without_hills(found, training, operations)
    return [cut.place for cut in kept], [cut.in_evaluation for cut in kept]


def alive_bytes(program: Program, begin: int) -> int | None:
    """Bytes of what is alive before a step; None where it may be no boundary: something alive is no
    tensor, or of a size that is not known, or two names of one memory that is changed behind it."""
    alive = program.alive(begin)
    if not all(map(has_known_size, alive)) or program.parts_memory(begin):
        return None
    values: list[Tensor] = [node.meta["val"] for node in alive]
    return sum(value.numel() * value.element_size() for value in values)


def _uses(program: Program) -> dict[int, list[Use]]:
    """The steps that read parameters, or buffers that are changed, with what they read. Of such
    buffers all uses of one module are one, since they have to be in one layer."""
    seen: Counter[str] = Counter()
    found: dict[int, list[Use]] = {}
    for index, step in enumerate(program.steps):
        for of in program.weights_of(step):
            if of.name in program.changed:
                found.setdefault(index, []).append((of.name.rpartition(".")[0], -1))
                continue
            if of.is_parameter:
                found.setdefault(index, []).append((of.name, seen[of.name]))
                seen[of.name] += 1
    return found


def _indices(uses: Mapping[int, Sequence[Use]]) -> list[tuple[int, int]]:
    """The first and the last step of groups that no cut may part."""
    last_of = {use: index for index, of in uses.items() for use in of}
    groups: list[tuple[int, int]] = []
    for index, of in uses.items():
        last = max(last_of[use] for use in of)
        if groups and index <= groups[-1][1]:
            groups[-1] = (groups[-1][0], max(last, groups[-1][1]))
        else:
            groups.append((index, last))
    return groups


def _cheapest(program: Program, first: int, last: int) -> tuple[int, int] | None:
    """The bytes alive at the best place from step `first` to step `last`, and that place."""
    costs = [(alive_bytes(program, place), -place) for place in range(first, last + 1)]
    able = [(cost, place) for cost, place in costs if cost is not None]
    if not able:
        return None
    cost, place = min(able)
    return cost, -place


def _place_between(
    program: Program, uses: Mapping[int, Sequence[Use]], before: set[Use], behind: set[Use]
) -> int | None:
    """The place in another graph that parts the same uses; None: there is none. What the first
    graph does not use may be on either side."""
    mine = [index for index, of in uses.items() if not before.isdisjoint(of)]
    rest = [index for index, of in uses.items() if not behind.isdisjoint(of)]
    first, last = max(mine, default=-1) + 1, min(rest, default=len(program.steps))
    best = _cheapest(program, first, last) if first <= last else None
    return None if best is None else best[1]


def _without_hills(
    found: Sequence[Cut], program: Program, operations: Mapping[Node, int]
) -> list[Cut]:
    """The cuts without those that cost more than cuts on both sides of them."""
    kept, most = list(found), _MOST * sum(operations.values())
    steps = [operations.get(step, 0) for step in program.steps]
    for cost in sorted({cut.cost for cut in found}, reverse=True):
        for hill in _hills(kept, cost):
            for cut in hill:
                at = kept.index(cut)
                if sum(steps[kept[at - 1].place : kept[at + 1].place]) <= most:
                    del kept[at]
    return kept


def _hills(cuts: Sequence[Cut], cost: int) -> list[list[Cut]]:
    """The runs of cuts of a cost between two that cost less."""
    runs = [list(run) for _, run in groupby(cuts, lambda cut: cut.cost)]
    return [
        run
        for before, run, after in zip(runs, runs[1:], runs[2:], strict=False)
        if run[0].cost == cost and before[0].cost < cost > after[0].cost
    ]
