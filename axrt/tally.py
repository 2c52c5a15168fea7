"""What is known of past steps: losses from the last stage, gradient norms from every stage; both come as messages."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

Key = tuple[int, int]  # generation, step; an evaluation has a generation of its own


@dataclass(slots=True)
class Outcome:
    """Of one step or evaluation.

    Args:
        norms_wanted: how many stages send norms to this rank.
        loss: the mean over microbatches, None while it is not known.
        grad_norm: the 2-norm of all gradients, None while a part is missing or none is wanted.
    """

    norms_wanted: int
    loss: float | None = None
    grad_norm: float | None = None
    claimed: bool = False
    _norms: dict[int, Tensor] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        return self.loss is not None and (self.grad_norm is not None or not self.norms_wanted)

    def hear_norms(self, stage: int, norms: Tensor) -> None:
        self._norms[stage] = norms.cpu()
        if len(self._norms) == self.norms_wanted:
            self.grad_norm = total_norm(self._norms[stage] for stage in sorted(self._norms))
            self._norms.clear()


class Tally:
    """Outcomes that are not whole, or that nobody has asked for yet; an outcome that is both belongs to who asked.

    Args:
        stages: how many stages send norms to this rank: all to the main rank, none to the others.
    """

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._open: dict[Key, Outcome] = {}

    def hear_losses(self, generation: int, step: int, losses: list[float]) -> None:
        """The losses of microbatches in order; their mean is taken in float64."""
        self._outcome(generation, step).loss = sum(losses) / len(losses) if losses else math.nan
        self._let_go(generation, step)

    def hear_norms(self, generation: int, step: int, stage: int, norms: Tensor) -> None:
        """The norms of one stage's gradients, shape (number of parameters with a gradient,)."""
        self._outcome(generation, step).hear_norms(stage, norms)
        self._let_go(generation, step)

    def claim(self, generation: int, step: int, *, norms: bool) -> Outcome:
        """The outcome of a step, to be filled as messages come; with norms where the step has gradients."""
        outcome = self._outcome(generation, step)
        outcome.claimed = True
        outcome.norms_wanted = self._stages if norms else 0
        self._let_go(generation, step)
        return outcome

    def _outcome(self, generation: int, step: int) -> Outcome:
        return self._open.setdefault((generation, step), Outcome(self._stages))

    def _let_go(self, generation: int, step: int) -> None:
        outcome = self._open[generation, step]
        if outcome.claimed and outcome.whole:
            del self._open[generation, step]


def total_norm(parts: Iterable[Tensor]) -> float:
    """One norm of the norms, in model order, as `torch.nn.utils.clip_grad_norm_` takes it."""
    together = torch.cat(list(parts))
    return float(torch.linalg.vector_norm(together)) if together.numel() else 0.0
