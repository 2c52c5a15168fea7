"""Muon for matrices and AdamW for all else, as one optimizer.

Muon (Jordan et al. 2024): the step of a matrix is its momentum, made orthogonal.
"""

# In bfloat16 it has the bits of `torch.optim.Muon`, whose iterations multiply in that type alone. A
# processor without such instructions takes forty times as long for that as in float32, so torch's
# own class is not what runs.

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .matrix_optimizer import MatrixOptimizer, matrices_in, with_gradient

# Iterations of a quintic that is steepest at zero (Jordan et al. 2024), as torch has them.
ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_LEAST_NORM = 1e-7


class MuonAndAdamW(MatrixOptimizer):
    """Its groups of matrices have these options: lr, weight_decay, momentum; nesterov, whether the
    gradient is added to the momentum once more; ns_steps and ns_coefficients, the number and the
    polynomial of the iterations; adjust_lr, how the rate follows the shape; matrix_type, the type
    of the iterations' products."""

    def step_matrices(self, group: dict[str, Any]) -> None:
        lr, momentum, blocks = group["lr"], group["momentum"], group["blocks"]
        for parameter, gradient in with_gradient(group):
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(gradient)
            fused = parameter.detach(), gradient, state["momentum_buffer"]
            for matrix, of_it, average in zip(
                *[matrices_in(one, blocks) for one in fused], strict=True
            ):
                average.lerp_(of_it, 1 - momentum)
                ahead = of_it.lerp(average, momentum) if group["nesterov"] else average
                dtype = getattr(torch, group["matrix_type"])
                change = orthogonal(ahead, dtype, group["ns_steps"], group["ns_coefficients"])
                matrix.mul_(1 - lr * group["weight_decay"])
                matrix.add_(change, alpha=-lr * _factor(group["adjust_lr"], *matrix.shape))


def orthogonal(
    matrix: Tensor,
    dtype: torch.dtype,
    iterations: int = ITERATIONS,
    coefficients: Sequence[float] = COEFFICIENTS,
) -> Tensor:
    """A matrix with the same singular vectors, and singular values near 1.

    Args:
        matrix: shape (rows, columns).
        dtype: type of the products, and of the result.
        iterations: how often the polynomial is applied.
        coefficients: of its terms of first, third and fifth order.
    """
    first, second, third = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    made = matrix.to(dtype, copy=True)
    made = made.T if is_tall else made
    made.div_(made.norm().clamp(min=_LEAST_NORM))
    for _ in range(iterations):
        square = made @ made.T
        made = torch.addmm(
            made, torch.addmm(square, square, square, beta=second, alpha=third), made, beta=first
        )
    return made.T if is_tall else made


def _factor(adjust_lr: str, rows: int, columns: int) -> float:
    """The factor on the rate of a matrix."""
    if adjust_lr == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / max(1, columns)))


def operations_of_muon(rows: int, columns: int, iterations: int = ITERATIONS) -> float:
    """Operations of a step of one matrix: each iteration multiplies it by its own transpose, that
    by itself, and the sum of both by the matrix."""
    short, long = sorted((rows, columns))
    return 2.0 * iterations * (2 * short**2 * long + short**3)
