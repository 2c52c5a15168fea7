"""What an optimizer keeps besides moments, as it was before a step: counts of steps, factors,
values of its groups and its own attributes. It is small, and stays on the device where moments are
offloaded."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from .eager_optimizers import SGD

IsMoment = Callable[[Tensor, str, object], bool]  # of a parameter, a key of its state, the value
_PLAIN = (int, float, complex, str, bytes, type(None))
_ATTRIBUTES_OF_TORCH = frozenset(vars(SGD([torch.empty(0)], lr=0.0)))


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
        self._attributes = _own_attributes(optimizer)

    def restore(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the optimizer this state; what it has added since is dropped."""
        optimizer.state.clear()
        optimizer.state.update(self._state)
        for group, before in zip(optimizer.param_groups, self._groups, strict=True):
            for key in group.keys() - before.keys() - {"params"}:
                del group[key]
            group.update(before)
        for name in _own_attributes(optimizer).keys() - self._attributes.keys():
            delattr(optimizer, name)
        vars(optimizer).update(self._attributes)


def _own_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Copies of numbers, texts and lists, tuples and dicts of them that a class of the user's keeps
    as attributes."""
    return {
        name: deepcopy(value)
        for name, value in vars(optimizer).items()
        if name not in _ATTRIBUTES_OF_TORCH and _is_plain(value)
    }


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else deepcopy(value)
