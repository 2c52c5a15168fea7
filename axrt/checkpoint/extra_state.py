"""What modules keep besides weights and buffers (`get_extra_state`), as bytes without code: JSON,
and behind it the tensors that it names."""

#   8 bytes        length of the JSON text, little-endian
#   JSON           the state; a tensor stands as {"tensor": [dtype, shape]}, a tuple as {"tuple":
#                  [...]}, a dictionary as {"dict": [[key, value], ...]}
#   tensors        their bytes, in the order of the text
#
# A pickle would take any state, and would run what it finds when it is read. A checkpoint may come
# from anybody, so nothing in it is code, and a state that JSON and tensors cannot hold is refused
# when the run starts, not at its first save.

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from axrt.errors import DamagedError, DataError, SaveError
from axrt.scheduler.regular_file import MALFORMED, json_of

from .tensor_file import CheckedTensors

_SUFFIX = "_extra_state"  # of its name in a state dict, as torch has it
_LENGTH_BYTES = 8
_PLAIN = (bool, int, float, str, type(None))
_TYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    )
}


class UnsavableError(DataError, SaveError):
    """Extra state that no file can hold: at the start it is refused, later a save fails."""


def is_extra(name: str) -> bool:
    """A name in a state dict is that of extra state."""
    return name == _SUFFIX or name.endswith(f".{_SUFFIX}")


def encoded(name: str, state: Any) -> Tensor:
    """Extra state as bytes, shape (bytes,), uint8.

    Raises:
        UnsavableError: there is something else in it than tensors, numbers, texts, None, lists,
            tuples and dictionaries of these.
    """
    tensors: list[Tensor] = []
    try:
        text = json.dumps(_told(name, state, tensors)).encode()
        json_of(text)
    except (ValueError, RecursionError) as error:  # it could not be read back
        raise UnsavableError(f"{name} (get_extra_state): {error}") from None
    head = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    data = [torch.frombuffer(bytearray(head), dtype=torch.uint8)]
    data += [tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    return torch.cat(data)


def _told(name: str, value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype in _TYPES and value.layout is torch.strided and not value.is_meta:
            tensors.append(value.detach().resolve_neg())
            return {"tensor": [dtype, list(value.shape)]}
    if type(value) in _PLAIN:
        return value
    if type(value) is list:
        return [_told(name, one, tensors) for one in value]
    if type(value) is tuple:
        return {"tuple": [_told(name, one, tensors) for one in value]}
    if isinstance(value, dict) and all(type(key) in (str, int, bool) for key in value):
        return {"dict": [[key, _told(name, one, tensors)] for key, one in value.items()]}
    raise UnsavableError(
        f"{name} (get_extra_state) has {type(value).__name__}; expected tensors, numbers, texts, "
        "None, and lists, tuples and dictionaries of these, since nothing in a checkpoint is code"
    )


def decoded(data: Tensor) -> Any:
    """The state of `encoded`.

    Raises:
        ValueError: there is something else.
    """
    whole = data.numpy().tobytes()
    end = _LENGTH_BYTES + int.from_bytes(whole[:_LENGTH_BYTES], "little")
    try:
        told, place = json_of(whole[_LENGTH_BYTES:end]), end

        def tensor(dtype: str, shape: list[int]) -> Tensor:
            nonlocal place
            made = torch.empty(shape, dtype=_TYPES[dtype])
            mine = whole[place : place + made.nbytes]
            place += made.nbytes
            if len(mine) < made.nbytes:
                raise ValueError("it is cut off")
            if mine:
                its = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
                made.view(-1).view(torch.uint8).copy_(its)
            return made

        return _state(told, tensor)
    except (RuntimeError, *MALFORMED) as error:
        raise ValueError(f"no extra state: {str(error)[:100]}") from None


def _state(told: Any, tensor: Callable[[str, list[int]], Tensor]) -> Any:
    if isinstance(told, list):
        return [_state(one, tensor) for one in told]
    if not isinstance(told, dict):
        return told
    ((kind, value),) = told.items()
    if kind == "tensor":
        return tensor(*value)
    if kind == "tuple":
        return tuple(_state(one, tensor) for one in value)
    return {key: _state(one, tensor) for key, one in value}


def states_in(files: Mapping[int, CheckedTensors]) -> dict[tuple[int, str], Any]:
    """The extra state in files of weights, by index of the layer and path of the module in it.

    Args:
        files: files that have been checked, by index of the layer.
    Raises:
        DamagedError: what a file has is no such state.
        AxrtError: a file has changed since it was checked.
    """
    found = {}
    for place, file in files.items():
        for name in filter(is_extra, file.like):
            path = name.removeprefix(f"{place}.").removesuffix(_SUFFIX).removesuffix(".")
            try:
                found[place, path] = decoded(file.tensor(name))
            except ValueError as error:
                raise DamagedError(f"{file.path}: {name}: {error}") from None
    return found


def give_back(
    layers: Iterable[tuple[int, nn.Module]], states: Mapping[tuple[int, str], Any]
) -> None:
    """Give modules their extra state, and let those that load in a way of their own do so, when
    weights and buffers have their values.

    Args:
        layers: index and module of each layer.
    """
    for place, layer in layers:
        for (of, path), state in states.items():
            if of == place:
                layer.get_submodule(path).set_extra_state(state)
        if any(map(has_own_loading, layer.modules())):
            with torch.no_grad(), _as_no_change(layer):
                layer.load_state_dict(layer.state_dict())


@contextmanager
def _as_no_change(layer: nn.Module) -> Iterator[None]:
    """Context in which writing to weights counts as no change by the user: parameters are others
    of the same memory."""
    before = [(module, dict(module._parameters)) for module in layer.modules()]
    for module, parameters in before:
        for name, one in parameters.items():
            if one is not None:
                module._parameters[name] = nn.Parameter(one.data, requires_grad=False)
    try:
        yield
    finally:
        for module, parameters in before:
            module._parameters.update(parameters)


def has_own_loading(module: nn.Module) -> bool:
    """A module does more, as it loads, than to take values; torch's own modules, which only fit
    states of older versions, do not count."""
    own = type(module)._load_from_state_dict
    hooks = [
        *module._load_state_dict_pre_hooks.values(),
        *module._load_state_dict_post_hooks.values(),
    ]
    makers = [own, *(getattr(hook, "hook", hook) for hook in hooks)]
    return any(not (getattr(one, "__module__", None) or "").startswith("torch.") for one in makers)
