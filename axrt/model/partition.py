"""Where a list of layers is cut into stages: boundaries 0 = b0 <= b1 <= ... <= bS = number of
layers; stage s holds layers b[s]:b[s+1].

A rank may hold several stages. What counts is then the work of a rank, and not that of a stage.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise, product

from axrt.errors import ConfigError

from .layers import Layer, name_of, num_multiplied, num_parameters

OPERATIONS = "operations"
_Stages = Sequence[Sequence[int]]  # of each rank


def boundaries(
    layers: Sequence[Layer],
    stages: int,
    method: str | Sequence[int],
    held: _Stages | None = None,
) -> list[int]:
    """Cut the layers into stages.

    Args:
        layers: layers of the whole model.
        stages: number of stages; every one gets at least one layer, unless boundaries are given.
        method: "uniform" (equal numbers of layers), "parameters" (equal numbers of parameters),
            "operations" (as little as can be on the rank with most, by the parameters that a
            forward multiplies with: all but embeddings, which are looked up), "type:REGEX" (equal
            numbers of layers whose class name matches, without regard to case), or the boundaries
            themselves.
        held: for each rank the stages that it holds, which "operations" takes together; None: one
            rank a stage.
    Returns:
        The boundaries b0 to bS, stages + 1 numbers.
    Raises:
        ConfigError: there are more stages than layers, there is no such method, no layer matches,
            or the boundaries do not fit.
    """
    if not isinstance(method, str):
        return _checked(list(method), len(layers), stages)
    if stages > len(layers):
        one_a_rank = held is None or all(len(stages_of) == 1 for stages_of in held)
        policy = "" if one_a_rank else ", or take a policy with one stage a rank, such as zb-h1"
        raise ConfigError(
            f"{len(layers)} layers cannot fill {stages} stages; expected at most {len(layers)}. "
            "Start fewer ranks, make replicas of shorter pipelines (parallel.data), or give the "
            f"model more layers{policy}"
        )
    weights = [_weight_by(method)(layer) for layer in layers]
    cuts = balanced(weights, stages, method)
    return evened(weights, cuts, held) if held and method == OPERATIONS else cuts


def balanced(weights: Sequence[float], stages: int, method: str = "") -> list[int]:
    """Cut weights into contiguous parts, none empty, whose largest sum is as small as it can be;
    among equal cuts, the earliest win.

    Dynamic programming over (parts, layers): stages x layers^2 comparisons.

    Args:
        weights: weight of each layer.
        stages: number of parts, at most the number of layers.
        method: name of the method, for the error.
    Raises:
        ConfigError: all weights are 0.
    """
    if not any(weights):
        raise ConfigError(
            f"partition {method!r} finds nothing to balance: no layer counts. Set "
            "parallel.partition to 'uniform'"
        )
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


def busiest(weights: Sequence[float], cuts: Sequence[int], held: _Stages) -> float:
    """The weight of the rank with most."""
    return max(_loads(weights, cuts, held))


def evened(weights: Sequence[float], cuts: Sequence[int], held: _Stages) -> list[int]:
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


def _loads(weights: Sequence[float], cuts: Sequence[int], held: _Stages) -> list[float]:
    total = [0.0, *accumulate(weights)]
    of_stage = [total[end] - total[first] for first, end in pairwise(cuts)]
    return [sum(of_stage[stage] for stage in stages) for stages in held]


def _around_the_busiest(weights: Sequence[float], cuts: Sequence[int], held: _Stages) -> set[int]:
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


def _weight_by(method: str) -> Callable[[Layer], float]:
    if method == "uniform":
        return lambda layer: 1
    if method == "parameters":
        return num_parameters
    if method == OPERATIONS:
        return num_multiplied
    if method.startswith("type:"):
        try:
            pattern = re.compile(method.removeprefix("type:"), re.IGNORECASE)
        except re.error as error:
            raise ConfigError(
                f"parallel.partition is {method!r}, which is no regular expression: {error}"
            ) from None
        return lambda layer: bool(pattern.search(name_of(layer)))
    raise ConfigError(
        f"parallel.partition is {method!r}; expected 'uniform', 'parameters', 'operations', "
        "'type:REGEX' or a list of boundaries such as [0, 4, 8]"
    )


def _checked(cuts: list[int], layers: int, stages: int) -> list[int]:
    if (
        len(cuts) != stages + 1
        or cuts[0] != 0
        or cuts[-1] != layers
        or any(a > b for a, b in pairwise(cuts))
    ):
        raise ConfigError(
            f"partition {cuts} does not cut {layers} layers into {stages} stages; expected "
            f"{stages + 1} rising numbers from 0 to {layers}"
        )
    return cuts
