"""Short runs of a small model whose matrices are stepped whole."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import axrt
from axrt.transport.local import LocalWorld

from .reference import Item, Outcome, configured, random_batches, together, train_on_a_rank

MICROBATCHES = 4


class Block(nn.Module):
    """A residual block of two matrices, behind a norm if there is one."""

    def __init__(
        self, width: int, inner: int, has_norm: bool = True, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, dtype=dtype) if has_norm else nn.Identity()
        self.up = nn.Linear(width, inner, dtype=dtype)
        self.down = nn.Linear(inner, width, dtype=dtype)

    def forward(self, value: Tensor) -> Tensor:
        out: Tensor = value + self.down(torch.tanh(self.up(self.norm(value))))
        return out


def six_blocks(first: Any, block: Any, last: Any) -> axrt.PipelineModule:
    """Layers 1 to 6 are blocks; the first takes 8 features, and the last makes 5 logits."""
    return axrt.PipelineModule([first, *[block] * 6, last], nn.functional.cross_entropy)


def batches(replicas: int) -> Callable[[int], list[Item]]:
    return random_batches((6, 8), classes=5, microbatches=MICROBATCHES * replicas)


def trained_on(
    pipe: int,
    data: int,
    of: Callable[[], axrt.PipelineModule],
    steps: int,
    given: Callable[[int], list[Item]] | None = None,
    **sections: Any,
) -> Outcome:
    """The outcome of a run on ranks of one process, by the optimizer of its keys.

    Args:
        given: microbatches of a step, of all replicas; None: `batches`.
    """
    config = configured(MICROBATCHES, parallel={"pipe": pipe, "data": data}, **sections)

    def main(transport: Any) -> Outcome:
        by_key: Any = None
        return train_on_a_rank(transport, of(), given or batches(data), steps, config, by_key)

    return together(LocalWorld(pipe * data, 1).run(main), data)
