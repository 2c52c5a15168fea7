"""Where a list of layers is cut into stages: boundaries 0 = b0 <= b1 <= ... <= bS = number of
layers; stage s holds layers b[s]:b[s+1]."""

import re
from collections.abc import Callable, Sequence
from itertools import pairwise

from axrt.errors import ConfigError
from axrt.scheduler.planning.balance import Stages, balanced, evened
from axrt.scheduler.plural import plural

from .layers import Layer, counted, name_of, num_multiplied, num_parameters

OPERATIONS = "operations"


def boundaries(
    layers: Sequence[Layer],
    stages: int,
    method: str | Sequence[int],
    held: Stages | None = None,
) -> list[int]:
    """Cut the layers into stages.

    Args:
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
        helps = held is not None and len(held) <= len(layers)  # one stage a rank would do
        policy = ", or take a policy with one stage a rank, such as zb-h1" if helps else ""
        raise ConfigError(
            f"{plural(len(layers), 'layer')} cannot fill {plural(stages, 'stage')}; expected at "
            f"most {len(layers)}. Start fewer ranks, make replicas of shorter pipelines "
            f"(parallel.data), or give the model more layers{policy}"
        )
    weights = counted(layers, _weight_by(method))
    if not any(weights):
        raise ConfigError(
            f"partition {method!r} finds nothing to balance: no layer counts. Set "
            "parallel.partition to 'uniform'"
        )
    cuts = balanced(weights, stages)
    return evened(weights, cuts, held) if held and method == OPERATIONS else cuts


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
            f"partition {cuts} does not cut {plural(layers, 'layer')} into "
            f"{plural(stages, 'stage')}; expected {stages + 1} rising numbers from 0 to {layers}"
        )
    return cuts
