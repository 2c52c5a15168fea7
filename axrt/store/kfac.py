"""K-FAC for matrices and AdamW for all else, as one optimizer.

K-FAC (Martens and Grosse 2015): the gradient of the matrix of a linear layer times the inverses of
two factors, A of the layer's inputs and G of the gradients of its outputs. The factors are those of
the owner's own microbatches, and none of them travels (DP-KFAC, Zhang et al. 2022).
"""

# For a matrix that N rows of the batch go through, of which the owner has n, one of c copies:
#
#     A = sum over its rows of x x' / n        the loss is a mean over rows, and so has row r the
#     G = sum over its rows of N^2 g g' / n    gradient N g of its own; N = c n
#
# Where losses have weights, W over the whole batch, G has W for N: its rows have W g, and W / c is
# what the owner has of it.
#
# Both are running averages that begin with the identity. The damping is split by pi, the root of
# the mean eigenvalue of A over that of G, and added to a copy when a refresh is due, see
# `refreshed.py`. The first refresh is due behind the first step; until it is used, factors are the
# identity. The change of a matrix is
#
#     v = (G + sqrt(damping) / pi)^-1  gradient  (A + pi sqrt(damping))^-1
#
# and all matrices are stepped by `nu` of it, so that the step changes the model's outputs by no
# more than `kl_clip` (Ba et al. 2017): nu^2 lr^2 (sum of v times the gradient) is at most that.
# Momentum is of nu v.
#
# That sum is over all matrices of the model, and so joins the vote on the norm of all gradients
# (`scheduler/rules/precondition.py`). A factor that is no number, or has no inverse, makes it one
# that is none, and the step is dropped.

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from axrt.errors import ModelError
from axrt.model.factor_sums import FactorSums

from .matrix_optimizer import MatrixOptimizer, matrices_in, with_gradient
from .refreshed import State, compute_due, is_due_behind, put_aside, take_new

_SIDES = ("left", "right")


class KfacAndAdamW(MatrixOptimizer):
    """Its groups of matrices have these options: lr, weight_decay, momentum; decay, the weight of
    the factors before; damping; kl_clip, 0: nu is 1; sample, steps from one whose factors count to
    the next; refresh, lag and offset, see `refreshed.py`.

    Attributes:
        slope: sum of v times the gradient over all matrices of the model, shape (); None: nu is 1.
    """

    slope: Tensor | None = None

    def __init__(self, *groups: Any) -> None:
        super().__init__(*groups)
        self._watched: dict[nn.Parameter, _Watched] = {}
        self._preconditioned: set[nn.Parameter] = set()

    def sums_of(self, parameter: nn.Parameter, copies: int) -> FactorSums | None:
        """Where what a matrix is given in a step is to be added up; None: it is no matrix.

        Args:
            copies: number of copies of it, each of which has as many microbatches.
        """
        options = self._options_of(parameter)
        if not options["blocks"]:
            return None

        def is_wanted() -> bool:
            step = self.state.get(parameter, {}).get("step", 0)
            return bool(step % options["sample"] == 0)

        sums = FactorSums(parameter.detach(), options["blocks"], is_wanted)
        self._watched[parameter] = _Watched(sums, copies)
        return sums

    @torch.no_grad()
    def precondition(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor | None:
        """Turn the gradient of a matrix into its change, in place.

        Returns:
            The sum of both's products by element, shape (), which is no number where a factor is
            not; None: it is no matrix.
        """
        options = self._options_of(parameter)
        if not options["blocks"]:
            return None
        state = self._state_of(parameter, options)
        if _is_due(state["step"] - options["lag"], options):
            self._compute_due(parameter)
            for side in _sides(options):
                take_new(state, side, "inverse")
        given = gradient.clone()
        for number, matrix in enumerate(matrices_in(gradient, options["blocks"])):
            left, right = (state[f"{side}.{number}.inverse"] for side in _SIDES)
            torch.mm(left @ matrix, right, out=matrix)
        self._preconditioned.add(parameter)
        slope = (given * gradient).sum()
        watched = self._watched.get(parameter)
        return slope + watched.nothing if watched else slope

    def check_inverses(self, parameter: nn.Parameter, name: str) -> None:
        """Check why a step is dropped, on the host.

        Raises:
            ModelError: a factor of a matrix is not positive definite.
        """
        state = self.state[parameter]
        inverses = [one for key, one in state.items() if key.endswith(".inverse")]
        if not all(bool(one.isfinite().all()) for one in inverses):
            damping = self._options_of(parameter)["damping"]
            raise ModelError(
                f"a factor of {name} is not positive definite with optimizer.damping = "
                f"{damping:g}; expected at least {_enough(state, damping):.2g}"
            )

    def forget(self, parameter: nn.Parameter) -> None:
        """The gradient of a matrix is made anew for its step, or dropped."""
        self._preconditioned.discard(parameter)

    def forget_step(self) -> None:
        """Drop what was added up, and gradients."""
        self._preconditioned.clear()
        for watched in self._watched.values():
            watched.sums.forget()

    def scale_sums(self, factor: float | Tensor, weight: float | None) -> None:
        """Multiply the gradients that were added up by a number.

        Args:
            weight: sum of the weights of all losses; None: they are means over rows.
        """
        for watched in self._watched.values():
            watched.sums.scale(factor)
            watched.weight = weight

    def refresh(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"] if group["blocks"] else ():
                self._compute_due(parameter)

    def step_matrices(self, group: dict[str, Any]) -> None:
        for parameter, gradient in with_gradient(group):
            if parameter not in self._preconditioned:
                self.precondition(parameter, gradient)
            self._preconditioned.discard(parameter)
            state, lr = self.state[parameter], group["lr"]
            if "momentum_buffer" not in state:  # not before: it is where the master is now
                state["momentum_buffer"] = torch.zeros_like(parameter)
            momentum = state["momentum_buffer"]
            momentum.mul_(group["momentum"]).add_(gradient * self._nu(group))
            parameter.mul_(1 - lr * group["weight_decay"])
            parameter.add_(momentum, alpha=-lr)
            if parameter in self._watched:
                self._watched[parameter].average_into(state, 1 - group["decay"])
            if _is_due(state["step"], group):
                _put_factors_aside(state, group)
            state["step"] += 1

    def _nu(self, options: Mapping[str, Any]) -> float | Tensor:
        if self.slope is None or not options["kl_clip"]:
            return 1.0
        most: Tensor = options["kl_clip"] / (options["lr"] ** 2 * self.slope.clamp(min=0))
        return most.sqrt().clamp(max=1)

    def _options_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        return next(
            group for group in self.param_groups if any(one is parameter for one in group["params"])
        )

    def _state_of(self, parameter: nn.Parameter, options: Mapping[str, Any]) -> State:
        """The state of a matrix, which may begin here."""
        state: State = self.state[parameter]
        if not state:
            state["step"] = 0
            begin = 1 / (1 + math.sqrt(options["damping"]))
            state["right.factor"] = _eye(parameter, parameter.shape[1])
            for number, rows in enumerate(options["blocks"]):
                state[f"left.{number}.factor"] = _eye(parameter, rows)
                for side, size in zip(_SIDES, (rows, parameter.shape[1]), strict=True):
                    state[f"{side}.{number}.inverse"] = begin * _eye(parameter, size)
        return state

    def _compute_due(self, parameter: nn.Parameter) -> None:
        compute_due(self.state.get(parameter, {}), _inverse)


class _Watched:
    """A matrix of which is known what it is given in a step."""

    def __init__(self, sums: FactorSums, copies: int) -> None:
        self.sums, self._copies = sums, copies
        self.weight: float | None = None  # of all losses of the step; None: they are means

    @property
    def nothing(self) -> Tensor | float:
        """0, or no number where a sum is none."""
        return 0 * self.sums.trace if self.sums.rows else 0.0

    def average_into(self, state: State, weight: float) -> None:
        """Give what was added up a weight in the factors, and begin anew."""
        sums = self.sums
        if not sums.rows:
            return
        state["right.factor"].lerp_(sums.inputs / sums.rows, weight)
        all_rows = sums.rows * self._copies if self.weight is None else self.weight
        for number, output in enumerate(sums.outputs):
            state[f"left.{number}.factor"].lerp_(output * (all_rows * self._copies), weight)
        sums.forget()


def _is_due(step: int, options: Mapping[str, Any]) -> bool:
    return step == 0 or is_due_behind(step, options)


def _sides(options: Mapping[str, Any]) -> list[str]:
    return [f"{side}.{number}" for number in range(len(options["blocks"])) for side in _SIDES]


def _put_factors_aside(state: State, options: Mapping[str, Any]) -> None:
    """Damped copies of the factors are what is inverted."""
    inputs = state["right.factor"]
    for number in range(len(options["blocks"])):
        outputs, root = state[f"left.{number}.factor"], math.sqrt(options["damping"])
        pi = _pi(inputs, outputs)
        put_aside(state, f"left.{number}", outputs + root / pi * _eye(outputs, len(outputs)))
        put_aside(state, f"right.{number}", inputs + root * pi * _eye(inputs, len(inputs)))


def _pi(inputs: Tensor, outputs: Tensor) -> Tensor:
    """How the damping is split: the root of one mean eigenvalue over the other."""
    least = torch.finfo(inputs.dtype).tiny
    means = [(one.trace() / len(one)).clamp(min=least) for one in (inputs, outputs)]
    return (means[0] / means[1]).sqrt()


def _eye(like: Tensor, size: int) -> Tensor:
    return torch.eye(size, dtype=like.dtype, device=like.device)


def _inverse(factor: Tensor) -> Tensor:
    """The inverse; no numbers where there is none."""
    root, fault = torch.linalg.cholesky_ex(factor)
    # Whoever read the fault here would wait for all that the device has to do. The vote on the step
    # that uses the inverse reads it, see `check_inverses`.
    return torch.cholesky_inverse(root.masked_fill_(fault != 0, math.nan))


def _enough(state: State, damping: float) -> float:
    """A damping with which no factor that a matrix has would be near to singular."""
    found = damping
    inputs = state["right.factor"].double()
    for key, outputs in state.items():
        if key.startswith("left.") and key.endswith(".factor"):
            pi = float(_pi(inputs, outputs.double()))
            for factor, share in ((inputs, pi), (outputs.double(), 1 / pi)):
                values = torch.linalg.eigvalsh(factor)
                lacks = 1e-6 * float(values[-1]) - float(values[0])
                found = max(found, (max(0.0, lacks) / share) ** 2)
    return found


def operations_of_kfac(rows: int, columns: int, refresh: int) -> float:
    """Operations of a step of one matrix: its change, and once in `refresh` steps both inverses.
    Those of its factors go with the microbatches, and are about as many on each owner."""
    return 2.0 * rows * columns * (rows + columns) + 2 * (rows**3 + columns**3) / refresh


def kept_by_kfac(blocks: tuple[int, ...], columns: int, refresh: int, lag: int) -> int:
    """Numbers that are kept of a matrix, or of those that it is fused of, beside its momentum:
    factors, sums and inverses, and for `lag` of `refresh` steps the next inverses."""
    factors = columns**2 + sum(rows**2 for rows in blocks)
    inverses = sum(columns**2 + rows**2 for rows in blocks)
    return round(2 * factors + inverses * (1 + lag / refresh))
