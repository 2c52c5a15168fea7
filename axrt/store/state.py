"""The state of an optimizer, parameter by parameter and by name: how it is saved and restored."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from axrt.device.device import CPU
from axrt.errors import DataError
from axrt.scheduler.plural import plural

from .matrix_optimizer import MatrixOptimizer

Groups = Sequence[Mapping[str, Any]]


@dataclass(slots=True)
class ParameterState:
    """The optimizer's state of one parameter."""

    optimizer: str  # class name of the optimizer
    tensors: dict[str, Tensor] = field(default_factory=dict)  # moments and other tensors, by key
    # values that are no tensors (None, bool, int, float, str), by key
    plain: dict[str, Any] = field(default_factory=dict)
    # values that the optimizer itself has changed in the parameter's group, by key. The
    # learning rate is left out: it follows from the step.
    group: dict[str, Any] = field(default_factory=dict)

    def empty(self) -> Self:
        """The same state with memory of its own on the CPU, of any values."""
        tensors = {key: torch.empty_like(one, device=CPU) for key, one in self.tensors.items()}
        return replace(self, tensors=tensors)


def saved_state(
    optimizer: torch.optim.Optimizer, initial: Groups, name_of: Mapping[nn.Parameter, str]
) -> Iterator[tuple[str, ParameterState]]:
    """Each parameter's name with its state.

    Args:
        name_of: name of each of its parameters.
    Raises:
        DataError: some state is neither a tensor nor a plain value, or is not told by parameter.
    """
    states = _states(optimizer)
    for group, before in zip(optimizer.param_groups, initial, strict=True):
        changed = {
            key: value
            for key, value in group.items()
            if key not in ("params", "lr") and _differs(value, before.get(key))
        }
        for parameter in group["params"]:
            state = states.get(parameter, {})
            tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
            plain = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
            _check_plain(f"optimizer state {name_of[parameter]}", plain)
            _check_plain(f"the optimizer's group of {name_of[parameter]}", changed)
            yield (
                name_of[parameter],
                ParameterState(kind_of(optimizer, group), tensors, plain, changed),
            )


def kind_of(optimizer: object, group: Mapping[str, Any]) -> str:
    """How parameters of a group are stepped: the class of the optimizer and, where that steps
    matrices and all else apart, the rows of each matrix that they are fused of."""
    name = type(optimizer).__name__
    return f"{name} {tuple(group['blocks'])}" if isinstance(optimizer, MatrixOptimizer) else name


def options_told(groups: Groups) -> str:
    """The plain options of an optimizer's parameter groups as a text."""
    plain = [
        ", ".join(
            f"{key} = {value!r}"
            for key, value in group.items()
            if key != "param_names" and _is_plain(value)  # names are those of a shard
        )
        for group in groups
    ]
    return "; ".join(plain) or "nothing"


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is not None and isinstance(value, bool | int | float | str)


def restore_state(
    optimizer: torch.optim.Optimizer,
    initial: Groups,
    name_of: Mapping[nn.Parameter, str],
    states: Mapping[str, ParameterState],
) -> None:
    """Make saved states the optimizer's own.

    Args:
        name_of: name of each of its parameters.
        states: states by name; a parameter without one begins anew.
    """
    ordered = [
        name_of[parameter] for group in optimizer.param_groups for parameter in group["params"]
    ]
    # Torch's own rules decide the type and the device of each state.
    whole = optimizer.state_dict()
    whole["state"] = {
        number: {**states[name].tensors, **states[name].plain}
        for number, name in enumerate(ordered)
        if name in states and (states[name].tensors or states[name].plain)
    }
    for group, before in zip(whole["param_groups"], initial, strict=True):
        changed = [
            states[ordered[number]].group for number in group["params"] if ordered[number] in states
        ]
        group.update(
            {key: value for key, value in before.items() if key != "params"},
            **(changed[0] if changed else {}),
        )
    optimizer.load_state_dict(whole)


def _states(optimizer: torch.optim.Optimizer) -> Mapping[Tensor, Mapping[str, Any]]:
    """The state of each parameter: that which `state_dict` tells, where a class has its own.

    Raises:
        DataError: it tells more than the state of parameters, or tells it otherwise.
    """
    if type(optimizer).state_dict is torch.optim.Optimizer.state_dict:
        return optimizer.state
    told, name = optimizer.state_dict(), type(optimizer).__name__
    if more := sorted(set(told) - {"state", "param_groups"}):
        raise DataError(
            f"{name}.state_dict() has {', '.join(more)} besides the state of parameters; expected "
            "`state` and `param_groups` alone, which can be saved by parameter"
        )
    numbers = [number for group in told["param_groups"] for number in group["params"]]
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    if len(numbers) != len(parameters):
        raise DataError(
            f"{name}.state_dict() has groups of {plural(len(numbers), 'parameter')}, and the "
            f"optimizer of {len(parameters)}; expected the same"
        )
    return {
        parameter: told["state"].get(number, {})
        for number, parameter in zip(numbers, parameters, strict=True)
    }


def _differs(value: object, initial: object) -> bool:
    return isinstance(value, Tensor) or isinstance(initial, Tensor) or value != initial


def _check_plain(what: str, values: Mapping[str, Any]) -> None:
    """Check values that are no tensors of a parameter's state."""
    for key, value in values.items():
        if not (value is None or type(value) in (bool, int, float, str)):
            raise DataError(
                f"{what}/{key} is {type(value).__name__}; expected a plain value there, or a "
                "tensor in the state of a parameter, which can be saved by name"
            )
