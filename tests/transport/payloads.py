"""Payloads of every kind that may travel, and what it means that one arrived as it was."""

from typing import Any

import torch
from torch import Tensor

from axrt.transport.payload import flatten


def _payloads() -> dict[str, Any]:
    matrix = torch.arange(12.0).reshape(3, 4)
    return {
        "nothing": None,
        "a number": 3,
        "a truth": True,
        "words": "F2.7",
        "a tensor": matrix.clone(),
        "one that wants a gradient": torch.randn(5, requires_grad=True),
        "bfloat16": torch.randn(7).bfloat16(),
        "float16": torch.randn(7).half(),
        "float64": torch.randn(3, 3, dtype=torch.float64),
        "integers": torch.arange(9),
        "bytes": torch.arange(9, dtype=torch.uint8),
        "booleans": torch.tensor([True, False, True]),
        "complex": torch.randn(4, dtype=torch.complex64),
        "float8": torch.randn(4).to(torch.float8_e4m3fn),
        "zero dimensions": torch.tensor(2.5),
        "nothing in it": torch.empty(0, 3),
        "transposed": matrix.t(),
        "every second column": matrix[:, ::2],
        "expanded": torch.tensor([1.0, 2.0]).unsqueeze(1).expand(2, 5),
        "a lone element, expanded": torch.tensor(1.0).expand(1),
        "channels last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "a conjugate": torch.randn(4, dtype=torch.complex64).conj(),
        "a tuple": (torch.randn(2), None, torch.arange(3)),
        "a dict": {
            "x": torch.randn(2, 2),
            "flags": [True, 1, 1.0],
            "inner": {"y": (torch.randn(1), None)},
        },
        "an empty tuple": (),
        "a size of one behind a larger one": torch.randn(16, 1),
        "a mask for all heads": torch.ones(3, 1, 4, 4, dtype=torch.bool).tril(),
        "sizes of one everywhere": (
            torch.randn(1, 3, 1),
            torch.randn(2, 1, 3, 1, 2, 1),
            torch.randn(1, 1),
            torch.randn(3, 1).t(),
        ),
        "a size of one with a stride of its own": torch.randn(6, 1)[::2],
        "overlapping": torch.arange(8.0).unfold(0, 4, 1),
        "negated": torch.randn(3, 2, dtype=torch.complex64).conj().imag,
        "large, with a size of one": (
            torch.randn(20_000, 1),
            torch.randn(3, 1, 90, 90),
            torch.randn(100, 1, 120).transpose(0, 2),
        ),
        "large": torch.randn(64, 1024),
        "large and transposed": torch.randn(64, 1024).t(),
        "large and small": (
            torch.randn(2),
            torch.randn(50_000),
            torch.randn(3),
            torch.randn(40_000).bfloat16(),
        ),
    }


with torch.random.fork_rng():
    torch.manual_seed(5)  # the same on every rank
    PAYLOADS = _payloads()


def assert_same(got: Any, sent: Any, name: str) -> None:
    """The same structure and types; tensors with the same type, shape, strides, wish for a
    gradient, and bits."""
    mine, its = flatten(got), flatten(sent)
    assert repr(mine[0]) == repr(its[0]), name
    assert len(mine[1]) == len(its[1]), name
    for tensor, original in zip(mine[1], its[1], strict=True):
        assert (tensor.dtype, tensor.shape, tensor.requires_grad) == (
            original.dtype,
            original.shape,
            original.requires_grad,
        ), name
        assert tensor.stride() == original.stride(), name
        assert _bits(tensor) == _bits(original), name


def _bits(tensor: Tensor) -> bytes:
    plain = (
        tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    )
    return plain.view(-1).view(torch.uint8).numpy().tobytes()
