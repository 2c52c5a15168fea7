"""SOAP for matrices and AdamW for all else, as one optimizer.

SOAP (Vyas et al. 2024) is Adam in the bases of Shampoo: those in which the running averages of
G G' and of G' G are diagonal, G the gradient of a matrix.
"""

# The bases of the first step are the eigenvectors of its own factors. Those of a refresh, see
# `refreshed.py`, are the factors times the bases, made orthogonal: one iteration of a power method.
# Columns, and the second moments in them, are put in the order of their eigenvalues when it is due,
# which changes nothing but how well one iteration does. The published code steps nothing in the
# first step; here Adam in the first bases does.
#
# Ours, since the libraries that have it (heavyball, pytorch_optimizer) refresh within a step, and
# keep bases in lists that no checkpoint could save by name.

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .matrix_optimizer import Blocks, MatrixOptimizer, matrices_in, with_gradient
from .refreshed import State, compute_due, is_due_behind, put_aside, take_new

_SIDES = ("left", "right")


class SoapAndAdamW(MatrixOptimizer):
    """Its groups of matrices have these options: lr, weight_decay, betas, eps; refresh, steps from
    one refresh to the next; lag, steps after which it is used; offset, added to the steps at which
    one is due."""

    def step_matrices(self, group: dict[str, Any]) -> None:
        for parameter, gradient in with_gradient(group):
            state = self.state[parameter]
            if not state:
                state["step"] = 0
                for key in ("exp_avg", "exp_avg_sq"):
                    state[key] = torch.zeros_like(gradient)
            for matrix in _matrices(parameter, gradient, state, group["blocks"]):
                matrix.step(state, group)
            state["step"] += 1

    def refresh(self) -> None:
        """Compute the bases that are due."""
        for group in self.param_groups:
            for parameter in group["params"] if group["blocks"] else ():
                compute_due(self.state.get(parameter, {}), _made_orthogonal)


class _Matrix:
    """One of the matrices that a parameter is fused of.

    Args:
        number: its place among them.
        weight, gradient, average, squares: its rows of the parameter, of the gradient and of the
            two moments, shape (rows, columns); squares are in the bases.
    """

    def __init__(
        self, number: int, weight: Tensor, gradient: Tensor, average: Tensor, squares: Tensor
    ) -> None:
        self._left, self._right = (f"{side}.{number}" for side in _SIDES)
        self._weight, self._gradient = weight, gradient
        self._average, self._squares = average, squares

    def step(self, state: State, options: Mapping[str, Any]) -> None:
        """Step it.

        Args:
            state: the parameter's state, with the number of steps before this one.
        """
        step, gradient = state["step"], self._gradient
        (first, second), lr = options["betas"], options["lr"]
        self._add_to_factors(state, second)
        if step == 0:
            self._begin(state)
        elif is_due_behind(step - options["lag"], options):
            self._take_new_bases(state)
        left, right = (state[f"{side}.basis"] for side in (self._left, self._right))
        turned = left.T @ gradient @ right
        self._squares.mul_(second).addcmul_(turned, turned, value=1 - second)
        self._average.lerp_(gradient, 1 - first)
        spread = (self._squares / (1 - second ** (step + 1))).sqrt_().add_(options["eps"])
        turned_average = left.T @ self._average @ right
        change = left @ (turned_average / spread) @ right.T
        self._weight.mul_(1 - lr * options["weight_decay"])
        self._weight.add_(change, alpha=-lr / (1 - first ** (step + 1)))
        if is_due_behind(step, options):
            self._be_due(state)

    def _add_to_factors(self, state: State, decay: float) -> None:
        gradient = self._gradient
        products = gradient @ gradient.T, gradient.T @ gradient
        for side, product in zip((self._left, self._right), products, strict=True):
            factor = state.setdefault(f"{side}.factor", torch.zeros_like(product))
            factor.lerp_(product, 1 - decay)

    def _begin(self, state: State) -> None:
        for side in (self._left, self._right):
            factor = state[f"{side}.factor"]
            if not factor.isfinite().all():  # weights will say so, as with any other optimizer
                factor = torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
            state[f"{side}.basis"] = torch.linalg.eigh(factor)[1].flip(1).contiguous()

    def _be_due(self, state: State) -> None:
        for dim, side in enumerate((self._left, self._right)):
            factor, basis = state[f"{side}.factor"], state[f"{side}.basis"]
            product = factor @ basis
            order = (basis * product).sum(0).argsort(descending=True, stable=True)
            self._squares.copy_(self._squares.index_select(dim, order))
            basis.copy_(basis[:, order])
            put_aside(state, side, product[:, order].contiguous())

    def _take_new_bases(self, state: State) -> None:
        compute_due(state, _made_orthogonal)
        for side in (self._left, self._right):
            take_new(state, side, "basis")


def _matrices(
    parameter: nn.Parameter, gradient: Tensor, state: State, blocks: Blocks
) -> Iterator[_Matrix]:
    fused = parameter.detach(), gradient, state["exp_avg"], state["exp_avg_sq"]
    for number, of_one in enumerate(zip(*[matrices_in(one, blocks) for one in fused], strict=True)):
        yield _Matrix(number, *of_one)


def _made_orthogonal(product: Tensor) -> Tensor:
    made: Tensor = torch.linalg.qr(product)[0]
    return made


def operations_of_soap(rows: int, columns: int, refresh: int) -> float:
    """Operations of a step of one matrix: both factors, the gradient and its average turned, the
    change turned back; once in `refresh` steps a product and its orthogonal part."""
    both, square = rows + columns, rows * columns
    return 2.0 * 4 * square * both + (2 + 4 / 3) * (rows**3 + columns**3) / refresh


def kept_by_soap(rows: int, columns: int, refresh: int, lag: int) -> int:
    """Numbers that one matrix keeps beside its moments: factors and bases, and for `lag` of
    `refresh` steps the next bases; of many matrices so many have some at a time."""
    return round((rows**2 + columns**2) * (2 + lag / refresh))
