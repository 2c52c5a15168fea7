"""Buffers of layers, such as running means, as they were at another time: for a step that is
skipped, and for layers that run again."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Remembered = tuple[nn.Module, str, Any, Any]  # owner, name, the buffer, and a copy of its value


def remembered_buffers(layers: nn.Module) -> list[Remembered]:
    """Every buffer with its owner and name, and a copy of its value: layers may change it in place,
    or put another there."""
    return [
        (owner, name, buffer, None if buffer is None else buffer.clone())
        for owner in layers.modules()
        for name, buffer in owner._buffers.items()
    ]


@torch.no_grad()
def recall(buffers: Sequence[Remembered]) -> None:
    """Give buffers the values that they had when they were remembered."""
    for owner, name, buffer, value in buffers:
        owner._buffers[name] = None if buffer is None else buffer.copy_(value)


@contextmanager
def buffers_in_place_of(layers: Iterable[tuple[nn.Module, dict[str, Tensor]]]) -> Iterator[None]:
    """Context in which layers have their buffers, such as running means, from their first forward;
    afterwards they have the present ones again.

    The tensors are exchanged, not their values: the new graph may keep what it reads.
    """
    now = []
    for layer, before in layers:
        for name, buffer in before.items():
            path, _, last = name.rpartition(".")
            owner = layer.get_submodule(path)
            now.append((owner._buffers, last, owner._buffers[last]))
            owner._buffers[last] = buffer
    try:
        yield
    finally:
        for buffers, name, buffer_now in now:
            buffers[name] = buffer_now
