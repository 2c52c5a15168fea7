"""What a linear layer was given in a step, added up as K-FAC needs it: its inputs times themselves,
and the gradients of its outputs times themselves."""

# A sum is over the rows of this rank's microbatches in the order of their backwards, which is the
# same under every policy. Where weight gradients wait, a pair waits beside them and fills idle time
# as they do: its products are about as dear as a weight gradient.
#
# A hook on the output gives the pair, and no function of autograd's does: it would have to return
# its input as a view, which nobody could change in place. So autograd knows nothing of what is held
# of the input, and it is looked at here whether it has been changed since.

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .deferral import Deferral
from .weight_product import Pair, flat_rows


class FactorSums:
    """Sums over the rows of a step.

    Args:
        weight: the weight, of whose type the sums are.
        blocks: rows of each matrix that it is fused of.
        is_wanted: function that says whether the step is one of those that are looked at.
    Attributes:
        inputs: sum of x x', shape (inputs, inputs).
        outputs: sum of g g' for the outputs of each block, shape (rows, rows).
        rows: number of rows; what sums have is not theirs where it is 0.
        uses: number of pairs, at most one a microbatch.
    """

    def __init__(
        self, weight: Tensor, blocks: Sequence[int], is_wanted: Callable[[], bool]
    ) -> None:
        self.is_wanted, self._blocks, self._dtype = is_wanted, list(blocks), weight.dtype
        self.inputs, *self.outputs = (
            weight.new_empty(side, side) for side in (weight.shape[1], *blocks)
        )
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self.rows = self.uses = 0

    @torch.no_grad()
    def add(self, gradient: Tensor, x: Tensor) -> None:
        """Add a pair up.

        Args:
            gradient: gradient of the outputs, shape (rows, outputs).
            x: inputs, shape (rows, inputs).
        """
        x, gradient = x.to(self._dtype), gradient.to(self._dtype)
        parts = x, *torch.split(gradient, self._blocks, dim=1)
        for sum_, part in zip((self.inputs, *self.outputs), parts, strict=True):
            torch.addmm(sum_, part.T, part, beta=int(self.rows > 0), out=sum_)
        self.rows, self.uses = self.rows + len(x), self.uses + 1

    @property
    def trace(self) -> Tensor:
        """The trace of all sums together, shape ()."""
        return torch.stack([one.trace() for one in (self.inputs, *self.outputs)]).sum()

    @property
    def is_finite(self) -> bool:
        return bool(self.trace.isfinite())

    def scale(self, factor: float | Tensor) -> None:
        """Multiply the gradients that were added up by a number."""
        for sum_ in self.outputs:
            sum_.mul_(factor * factor)


class _Noted(Pair):
    """A pair that is to be added up."""

    def __init__(self, gradient: Tensor, x: Tensor, version: int, sums: FactorSums) -> None:
        super().__init__(gradient, x, version)
        self._sums = sums

    def __call__(self) -> None:
        self._sums.add(*self.rows())


def watch(module: nn.Linear, sums: FactorSums, deferral: Deferral) -> RemovableHandle:
    """Add up what a linear layer is given, until the hook is removed.

    Args:
        deferral: weight gradients of its stage that wait.
    """
    weight = module.weight

    def forwarded(module: nn.Module, given: tuple[Any, ...], out: Tensor) -> None:
        if not (torch.is_grad_enabled() and out.requires_grad and sums.is_wanted()):
            return
        x = given[0].detach()
        version = x._version

        def backwarded(gradient: Tensor) -> None:
            deferral.add_beside(weight, _Noted(flat_rows(gradient), x, version, sums))

        out.register_hook(backwarded)  # type: ignore[no-untyped-call]

    return module.register_forward_hook(forwarded)
