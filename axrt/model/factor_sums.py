"""What a linear layer was given in a step, added up as K-FAC needs it: its inputs times themselves,
and the gradients of its outputs times themselves."""

# A sum is over the rows of this rank's microbatches in the order of their backwards, which is the
# same under every policy. Where weight gradients wait, a pair waits beside them and fills idle time
# as they do. Its products are dearer than a weight gradient: both sides squared, in place of one
# times the other.
#
# A hook on the output gives the pair, and no function of autograd's does: it would have to return
# its input as a view, which nobody could change in place. So autograd knows nothing of what is held
# of the input, and it is looked at here whether it has been changed since.
#
# A weight may be used without its module, by two modules, or an output may be changed by a hook of
# the user's: then pairs are not all there is to the weight, and factors would be wrong without a
# word. So in the first step their products are added up as well, which must be the weight's
# gradient.

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .deferral import Deferral
from .weight_product import Pair, flat_rows

_APART = 0.05  # of a gradient's norm; it may have added up in a narrow type


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
        uses: number of pairs; a weight that is used once in a forward has one a microbatch.
        is_open: a step's backwards are running; others add nothing.
    """

    def __init__(
        self, weight: Tensor, blocks: Sequence[int], is_wanted: Callable[[], bool]
    ) -> None:
        self.is_wanted, self._blocks, self._dtype = is_wanted, list(blocks), weight.dtype
        self.inputs, *self.outputs = (
            weight.new_empty(side, side) for side in (weight.shape[1], *blocks)
        )
        self._product: Tensor | None = torch.zeros_like(weight)  # until it has been looked at
        self.is_open = False
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
        if self._product is not None:
            self._product.addmm_(gradient.T, x)
        parts = x, *torch.split(gradient, self._blocks, dim=1)
        for sum_, part in zip((self.inputs, *self.outputs), parts, strict=True):
            torch.addmm(sum_, part.T, part, beta=int(self.rows > 0), out=sum_)
        self.rows, self.uses = self.rows + len(x), self.uses + 1

    @property
    def trace(self) -> Tensor:
        """The trace of all sums together, shape ()."""
        return torch.stack([one.trace() for one in (self.inputs, *self.outputs)]).sum()

    def are_all_of(self, gradient: Tensor | None) -> bool:
        """What was added up since the sums were made is all that the weight's gradient is of; true
        once it has been found so.

        Args:
            gradient: gradient of the weight over the same microbatches; None: there is none.
        """
        if self._product is None or not self.is_wanted() or (gradient is None and not self.uses):
            return True
        product, self._product = self._product, torch.zeros_like(self._product)
        if gradient is None:  # a hook of the user's has dropped it
            return True
        norm, apart = gradient.norm(), (product - gradient).norm()
        if not apart.isfinite():
            return True
        if norm > 0:
            self._product = None
        return bool(apart <= _APART * norm)

    def scale(self, factor: float | Tensor) -> None:
        """Multiply the gradients that were added up by a number."""
        for sum_ in self.outputs:
            sum_.mul_(factor * factor)


class _Noted(Pair):
    """A pair that is to be added up."""

    _changed = "changed in place, and optimizer.name = 'kfac' needs it; expected a clone of it"

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
    hook = _Watch(module.weight, sums, deferral)
    return module.register_forward_hook(hook, prepend=True, with_kwargs=True)


class _Watch:
    """The hook of a linear layer; its copies, and what is pickled of it, do nothing."""

    def __init__(self, weight: Tensor, sums: FactorSums, deferral: Deferral) -> None:
        self._weight, self._sums, self._deferral = weight, sums, deferral

    def __reduce__(self) -> Any:
        return _no_watch, ()

    def __call__(self, module: nn.Module, args: Any, named: Any, out: Tensor) -> None:
        is_own = module._parameters["weight"] is self._weight
        if not (is_own and torch.is_grad_enabled() and out.requires_grad):
            return
        if not self._sums.is_wanted():
            return
        x: Tensor = args[0] if args else named["input"]
        of_weight = isinstance(x if x._base is None else x._base, nn.Parameter)
        # Weights may be let go before the backward.
        x = x.detach().clone() if of_weight else x.detach()
        version = x._version

        def backwarded(gradient: Tensor) -> None:
            if self._sums.is_open:
                noted = _Noted(flat_rows(gradient), x, version, self._sums)
                self._deferral.add_beside(self._weight, noted)

        out.register_hook(backwarded)  # type: ignore[no-untyped-call]


def _no_watch() -> Callable[..., None]:
    return _nothing


def _nothing(*of: object) -> None:
    """The hook of a copy."""
