"""What an optimizer keeps besides moments, as it was before a step: counts of steps, factors,
values of its groups. It is small, and stays on the device where moments are offloaded."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

IsMoment = Callable[[Tensor, str, object], bool]  # of a parameter, a key of its state, the value


class ResidentState:
    """A copy of that state.

    Args:
        optimizer: optimizer whose state it is.
        is_moment: function that says whether a parameter's key is a moment, which is not copied.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, is_moment: IsMoment) -> None:
        self._state = {
            parameter: {
                key: value if is_moment(parameter, key, value) else _copy(value)
                for key, value in of.items()
            }
            for parameter, of in optimizer.state.items()
        }
        self._groups = [
            {key: _copy(value) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]

    def restore(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the optimizer this state; what it has added since is dropped."""
        optimizer.state.clear()
        optimizer.state.update(self._state)
        for group, before in zip(optimizer.param_groups, self._groups, strict=True):
            for key in group.keys() - before.keys() - {"params"}:
                del group[key]
            group.update(before)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else deepcopy(value)
