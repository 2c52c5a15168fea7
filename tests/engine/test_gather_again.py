"""Tokens of all members that are let go behind a forward, and gathered again for the backward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import axrt
from axrt.errors import ConfigError, ModelError

from ..sweeps import swept
from .reference import Item
from .test_tensor import (
    CUTS,
    WIDTH,
    Added,
    Inner,
    Normed,
    assert_a_block_sends,
    few_sentences,
    language,
    sequences,
    trained,
)

AGAIN = {"gather_again": True}


class Writes(Inner):
    """Writes to what is gathered, other numbers on each member, before a matrix reads it."""

    def forward(self, value: tuple[Tensor, Tensor]) -> Any:
        before, given = value
        given.mul_(float(self.up.weight.detach()[0, 0]))
        return before, axrt.Sum(self.down(torch.relu(self.up(given))))


class Holds(Inner):
    """Holds on to what is gathered, and hands it on."""

    def forward(self, value: tuple[Tensor, Tensor]) -> Any:
        before, given = value
        return before, axrt.Sum(self.down(torch.relu(self.up(given)))), given


class AddedBoth(Added):
    def forward(self, value: Any) -> Tensor:
        before, made, given = value
        size = before.shape[-2]
        return super().forward((before + given[..., :size, :] * given[..., -size:, :], made))


class Writing(axrt.InPieces):
    def __init__(self) -> None:
        super().__init__([Normed(), Writes(), Added()])


class Holding(axrt.InPieces):
    def __init__(self) -> None:
        super().__init__([Normed(), Holds(), AddedBoth()])


class Negates(Inner):
    """Reads a view of what is gathered that torch negates when it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH // 2))

    def forward(self, value: tuple[Tensor, Tensor]) -> Any:
        before, given = value
        pairs = given.reshape(*given.shape[:-1], -1, 2)
        turned = torch.view_as_complex(pairs).conj().imag * self.scale
        return super().forward((before, given + nn.functional.pad(turned, (0, WIDTH // 2))))


class ReadsOne(Inner):
    """Reads one of two tensors of a shape, and each member another one; also sparse numbers."""

    def forward(self, value: tuple[Tensor, Tensor]) -> Any:
        before, given = value
        one, other = given, (2 * given).detach()
        if float(self.up.weight.detach().sum()) > 0:
            one = other
        mixed = torch.sparse.mm(torch.eye(WIDTH).to_sparse(), one.flatten(0, -2).t()).t()
        return super().forward((before, mixed.view_as(given)))


class Negating(axrt.InPieces):
    def __init__(self) -> None:
        super().__init__([Normed(), Negates(), Added()])


class ReadingOne(axrt.InPieces):
    def __init__(self) -> None:
        super().__init__([Normed(), ReadsOne(), Added()])


def of_pieces(layer: type[axrt.InPieces]) -> Callable[[], axrt.PipelineModule]:
    return lambda: axrt.PipelineModule(
        [axrt.LayerSpec(layer) for _ in range(3)], torch.nn.functional.mse_loss, tensor=CUTS
    )


@swept(
    (
        "model, batches",
        [
            (language, few_sentences),
            *((of_pieces(layer), sequences) for layer in (Writing, Holding, Negating, ReadingOne)),
        ],
    ),
    ("policy", ["zb-h1", "1f1b"]),
)
def test_bits_stay(
    model: Callable[[], axrt.PipelineModule], batches: Callable[[int], list[Item]], policy: str
) -> None:
    keys: dict[str, Any] = {"schedule": {"policy": policy}, "optimizer": {"clip": 0.5}}
    expected = trained(model, batches, 2, 2, **keys)
    assert trained(model, batches, 2, 2, **keys, parallel=AGAIN) == expected
    found = trained(model, batches, 2, 2, **keys, parallel=AGAIN, memory={"recompute": 1})
    assert found == expected


@pytest.mark.parametrize("tensor", [2, 4])
def test_a_block_sends_ten_slices_each_way_round(tensor: int) -> None:
    """Eight, and again what the first matrices of attention and feed-forward network keep."""
    assert_a_block_sends(10, tensor, parallel=AGAIN)


@pytest.mark.parametrize(
    ("section", "keys", "text"),
    [
        ("memory", {"offload_activations": 1}, "expected one of them"),
        ("memory", {"recompute": "full"}, "keep nothing that could be let go"),
        ("precision", {"compute": "bfloat16"}, "nothing would be let go"),
    ],
)
def test_what_it_does_not_go_with_is_refused(section: str, keys: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        axrt.Config.read({"parallel": {"tensor": 2, **AGAIN}, section: keys})


def test_what_passes_a_piece_aside_is_refused() -> None:
    class Aside(Inner):
        def forward(self, value: tuple[Tensor, Tensor]) -> Any:
            self.made = self.up(value[1]).mean(-1, keepdim=True)
            return super().forward(value)

    class Reads(Added):
        def __init__(self, inner: Aside) -> None:
            super().__init__()
            self._inner = [inner]

        def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
            size = value[0].shape[-2]
            made: Tensor = self._inner[0].made[..., :size, :]
            return super().forward(value) * made

    class Odd(axrt.InPieces):
        def __init__(self) -> None:
            inner = Aside()
            super().__init__([Normed(), inner, Reads(inner)])

    with pytest.raises(ModelError, match="went past its output"):
        trained(of_pieces(Odd), sequences, 1, 2, parallel=AGAIN)
