"""Payloads: nested values with tensors in them, taken apart and put together again."""

# A payload is a tensor, None, a bool, int, float or str, or a tuple, list or dict of payloads.
# Taken apart it is a *skeleton*, the same value with each tensor replaced by its place, and the
# tensors in order of appearance.

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from axrt.errors import OutputTypeError


@dataclass(frozen=True, slots=True)
class Slot:
    """A mark in a skeleton: tensor number `index` belongs there."""

    index: int


ONLY = Slot(0)  # the skeleton of nearly every payload, which is one tensor


def flatten(payload: object) -> tuple[object, list[Tensor]]:
    """Split a payload into its skeleton and its tensors, in order of appearance.

    Raises:
        OutputTypeError: a value of a type that cannot travel.
    """
    if isinstance(payload, Tensor) and payload.layout is torch.strided:
        return ONLY, [payload]
    tensors: list[Tensor] = []
    return _strip(payload, tensors), tensors


def unflatten(skeleton: object, tensors: list[Any]) -> Any:
    """Put a payload together again."""
    if skeleton is ONLY:
        return tensors[0]
    if isinstance(skeleton, Slot):
        return tensors[skeleton.index]
    if isinstance(skeleton, tuple):
        return tuple([unflatten(part, tensors) for part in skeleton])
    if isinstance(skeleton, list):
        return [unflatten(part, tensors) for part in skeleton]
    if isinstance(skeleton, dict):
        return {key: unflatten(part, tensors) for key, part in skeleton.items()}
    return skeleton


def on(device: torch.device, payload: object) -> Any:
    """The payload with its tensors on that device.

    Copies to an accelerator are asynchronous: they are in order with work on its current stream.
    Copies to the CPU are waited for. A tensor that is there already is not copied.
    """
    at_once = device.type != "cpu"
    if isinstance(payload, Tensor) and payload.layout is torch.strided:
        return payload.to(device, non_blocking=at_once)
    skeleton, tensors = flatten(payload)
    return unflatten(skeleton, [tensor.to(device, non_blocking=at_once) for tensor in tensors])


def detached(payload: object) -> Any:
    """The payload with its tensors outside of any graph; they share their memory with the given
    ones."""
    skeleton, tensors = flatten(payload)
    return unflatten(skeleton, [tensor.detach() for tensor in tensors])


def copied(payload: object) -> Any:
    """The payload with tensors in memory of their own and the same strides: kernels choose their
    way by strides."""
    skeleton, tensors = flatten(payload)
    return unflatten(
        skeleton,
        [_copy(tensor.detach()).requires_grad_(tensor.requires_grad) for tensor in tensors],
    )


def _copy(tensor: Tensor) -> Tensor:
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_contiguous():
        return tensor.clone()
    shape, strides = tensor.shape, tensor.stride()
    # what a stride of 0 repeats
    once = [1 if stride == 0 else size for size, stride in zip(shape, strides, strict=True)]
    copy = torch.empty_strided(once, strides, dtype=tensor.dtype, device=tensor.device).copy_(
        tensor.as_strided(once, strides)
    )
    return copy.as_strided(shape, strides)


def _strip(value: object, tensors: list[Tensor]) -> object:
    if isinstance(value, Tensor) and value.layout is torch.strided:
        tensors.append(value)
        return Slot(len(tensors) - 1)
    # Exact types: a subclass (a named tuple, a default dict) would arrive as something else.
    if type(value) is tuple:
        return tuple([_strip(part, tensors) for part in value])
    if type(value) is list:
        return [_strip(part, tensors) for part in value]
    if type(value) is dict:
        return {key: _strip(part, tensors) for key, part in value.items()}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise OutputTypeError(
        f"{type(value).__qualname__} cannot travel between stages; expected dense tensors, None, "
        "bool, int, float, str, "
        "or tuples, lists and dicts of these"
    )
