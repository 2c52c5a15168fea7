"""Where a list of layers is cut into stages: boundaries 0 = b0 <= b1 <= ... <= bS = number of
layers; stage s holds layers b[s]:b[s+1]."""

import re
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from axrt.errors import ConfigError

from .layers import Layer, name_of, num_parameters


def boundaries(layers: Sequence[Layer], stages: int, method: str | Sequence[int]) -> list[int]:
    """Cut the layers into stages.

    Args:
        layers: layers of the whole model.
        stages: number of stages; every one gets at least one layer, unless boundaries are given.
        method: "uniform" (equal numbers of layers), "parameters" (equal numbers of parameters),
            "type:REGEX" (equal numbers of layers whose class name matches, without regard to case),
            or the boundaries themselves.
    Returns:
        The boundaries b0 to bS, stages + 1 numbers.
    Raises:
        ConfigError: there are more stages than layers, there is no such method, no layer matches,
            or the boundaries do not fit.
    """
    if not isinstance(method, str):
        return _checked(list(method), len(layers), stages)
    if stages > len(layers):
        raise ConfigError(
            f"{len(layers)} layers cannot fill {stages} stages; expected at most {len(layers)}. "
            "Start fewer ranks, set parallel.pipe, give the model more layers, or take a policy "
            "with one stage a rank, such as zb-h1"
        )
    return balanced([_weight_by(method)(layer) for layer in layers], stages, method)


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


def _weight_by(method: str) -> Callable[[Layer], float]:
    if method == "uniform":
        return lambda layer: 1
    if method == "parameters":
        return num_parameters
    if method.startswith("type:"):
        try:
            pattern = re.compile(method.removeprefix("type:"), re.IGNORECASE)
        except re.error as error:
            raise ConfigError(
                f"parallel.partition is {method!r}, which is no regular expression: {error}"
            ) from None
        return lambda layer: bool(pattern.search(name_of(layer)))
    raise ConfigError(
        f"parallel.partition is {method!r}; expected 'uniform', 'parameters', 'type:REGEX' or a "
        "list of boundaries such as [0, 4, 8]"
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
