"""Shards of flat memory, and the pieces of parameters in them."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from axrt.store.flat import Layout
from axrt.store.masters import Masters
from axrt.store.shards import Cut

CPU = torch.device("cpu")


def odd() -> list[nn.Parameter]:
    """One with gaps in its memory, one in another order, an empty one, and others."""
    numbers = torch.arange(4000.0)
    given = [
        numbers[:1480].view(37, 40)[:, 3:19],
        numbers[:592].view(16, 37).t(),
        numbers[:0].view(0, 4),
        numbers[:7],
        numbers[:].view(50, 80),
    ]
    return [nn.Parameter(value) for value in given]


@pytest.mark.parametrize("shards", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("shift", [0, 5])
def test_every_element_is_in_one_piece(shards: int, whole: bool, shift: int) -> None:
    layout = Layout(odd(), narrowest=torch.bfloat16)
    found = [
        piece for pipe in range(shards) for piece in Cut(shards, pipe, shift, whole).pieces(layout)
    ]
    for place, size in enumerate(layout.sizes):
        spans = sorted((one.first, one.end) for one in found if one.place == place)
        assert [spans[0][0], spans[-1][1]] == [0, size]
        assert all(before[1] == after[0] for before, after in pairwise(spans))
        if whole or not layout.is_contiguous[place]:
            assert len(spans) == 1
    assert whole or shards == 1 or any(not one.is_whole for one in found)


@pytest.mark.parametrize("to", [None, torch.bfloat16])
@pytest.mark.parametrize("shards", [2, 3, 20])
def test_pieces_have_the_values_of_their_parameters(to: torch.dtype | None, shards: int) -> None:
    for mine in range(shards):
        given, parameters = odd(), odd()
        masters = Masters(
            parameters, [to] * len(parameters), CPU, Cut(shards, mine), torch.bfloat16
        )
        for piece, stepped in zip(masters.pieces, masters.parameters, strict=True):
            value = given[piece.place].detach()
            if not piece.is_whole:
                value = value.reshape(-1)[piece.first : piece.end]
            assert torch.equal(stepped.detach(), value)
