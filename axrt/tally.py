"""What is known of past steps: losses from the last stage, gradient norms from every stage; both come as messages."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

_REMEMBERED = 1024  # steps; a result read later than that is gone


Key = tuple[int, int]  # generation, step


@dataclass(slots=True)
class Tally:
    """Losses and norms by (generation, step), as far as they have come; an evaluation has a generation of its own.

    Args:
        stages: how many send norms.
    """

    stages: int
    _losses: dict[Key, float] = field(default_factory=dict)
    _norms: dict[Key, dict[int, Tensor]] = field(default_factory=dict)

    def hear_losses(self, generation: int, step: int, losses: list[float]) -> None:
        """The losses of microbatches in order; their mean is taken in float64."""
        self._losses[generation, step] = sum(losses) / len(losses) if losses else math.nan
        self._losses.pop((generation, step - _REMEMBERED), None)

    def hear_norms(self, generation: int, step: int, stage: int, norms: Tensor) -> None:
        """The norms of one stage's gradients, shape (number of parameters with a gradient,)."""
        self._norms.setdefault((generation, step), {})[stage] = norms.cpu()
        self._norms.pop((generation, step - _REMEMBERED), None)

    def loss(self, generation: int, step: int) -> float | None:
        """The mean loss, None while it is not known."""
        return self._losses.get((generation, step))

    def grad_norm(self, generation: int, step: int) -> float | None:
        """The 2-norm of all gradients, None while a stage's part is missing."""
        norms = self._norms.get((generation, step), {})
        if len(norms) < self.stages:
            return None
        return total_norm(norms[stage] for stage in sorted(norms))


def total_norm(parts: Iterable[Tensor]) -> float:
    """One norm of the norms, in model order, as `torch.nn.utils.clip_grad_norm_` takes it."""
    together = torch.cat(list(parts))
    return float(torch.linalg.vector_norm(together)) if together.numel() else 0.0
