"""What an optimizer of matrices computes anew now and then: due behind one step, used in a later
one."""

# In the step number t of a matrix, from 0:
#
#   t = o + r v,      behind its step, refresh v is due: what it is computed of is put aside
#   v >= 1
#   any time          `compute_due` computes it
#   t = o + r v + lag the result is used from here on; who has not computed it does so now
#
# The offset o goes round over the matrices of a model, so that each step refreshes as many of them.
# So bits depend on the number of the step, and not on when a refresh was computed: it is the dear
# part, and may fill time in which nothing else is to do.

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

State = dict[str, Any]


def is_due_behind(step: int, options: Mapping[str, Any]) -> bool:
    """A refresh is due behind this step of a matrix.

    Args:
        options: `refresh`, `lag` and `offset` of the matrix.
    """
    refresh, past = options["refresh"], step - options["offset"]
    return bool(past >= refresh and past % refresh == 0)


def put_aside(state: State, side: str, source: Tensor) -> None:
    """Have a refresh of a side of a matrix computed of a tensor, which nobody else has."""
    state.pop(f"{side}.new", None)
    state[f"{side}.due"] = source


def compute_due(state: State, compute: Callable[[Tensor], Tensor]) -> None:
    """Compute what is due."""
    for key in [key for key in state if key.endswith(".due")]:
        state[key.removesuffix("due") + "new"] = compute(state.pop(key)).contiguous()


def take_new(state: State, side: str, key: str) -> None:
    """Use what was computed from here on; there is none if `refresh` or `lag` were others until
    now."""
    if f"{side}.new" in state:
        state[f"{side}.{key}"] = state.pop(f"{side}.new")
