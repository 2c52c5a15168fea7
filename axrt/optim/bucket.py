"""A bucket: parameters of one stage that are reduced and stepped as one.

Where several ranks (or several layers, of tied weights) hold it, each holder sends every other its *part* of the gradient,
cut into one *shard* a holder; who owns a shard adds the parts up in the order of holders, in float32 or better, and sends
the *sum* back. That is the volume of a ring, needs no operator of MPI, and has one order of summation
whatever the timing, the sizes of buckets and the library.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

OptimizerFactory = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
Schedule = Callable[[int], float]
Part = tuple[Tensor, Tensor | None]  # a shard of a gradient; which parameters have one, None where all do


def constant(step: int) -> float:
    """The schedule that leaves the learning rate as it is."""
    return 1.0


class Bucket:
    """Parameters, and the optimizer that the user's factory made for them.

    Args:
        named: (name, parameter) pairs; may be empty, then there is no optimizer.
        places: of each parameter in the model, rising numbers.
        factory: makes the optimizer; parameter groups may carry learning rates of their own.
        schedule: `schedule(step)` is the factor on every group's learning rate.
    """

    def __init__(
        self, named: Sequence[tuple[str, nn.Parameter]], places: Sequence[int], factory: OptimizerFactory, schedule: Schedule
    ) -> None:
        self.named = list(named)
        self._parameters = [parameter for _, parameter in named]
        self._places = torch.tensor(places, dtype=torch.int64)
        self._schedule = schedule
        self.optimizer = factory(named) if named else None
        self._initial_lrs = [group["lr"] for group in self._groups]
        self._used = [True] * len(self._parameters)

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups if self.optimizer else []

    @property
    def lr(self) -> float | None:
        """Of the first parameter group, in the last step; None where there is none."""
        return float(self._groups[0]["lr"]) if self._groups else None

    # Adding up.

    def parts(self, holders: int) -> list[Part]:
        """This holder's gradient, cut into a shard for each holder; the gradient is given away."""
        gradients = [parameter.grad for parameter in self._parameters]
        mask = None
        if any(gradient is None for gradient in gradients):
            mask = torch.tensor([gradient is not None for gradient in gradients], dtype=torch.uint8)
        whole = [
            torch.zeros_like(parameter) if gradient is None else gradient
            for parameter, gradient in zip(self._parameters, gradients, strict=True)
        ]
        flat = torch.cat([gradient.reshape(-1).to(_wide(gradient.dtype)) for gradient in whole]) if whole else torch.empty(0)
        self.forget_gradients()
        return [(shard, mask) for shard in _cut(flat, holders)]

    def add_up(self, parts: Sequence[Part]) -> Tensor:
        """The sum of the parts of this holder's shard, in the order of holders."""
        total = parts[0][0].clone()
        for shard, _ in parts[1:]:
            total += shard
        masks = [mask for _, mask in parts]
        used = [torch.ones(len(self._parameters), dtype=torch.uint8) if mask is None else mask.cpu() for mask in masks]
        self._used = torch.stack(used).any(dim=0).tolist()
        return total

    def take_sums(self, sums: Sequence[Tensor]) -> None:
        """Make the sums of all shards the gradient; a parameter that no holder has used keeps none."""
        flat, at = torch.cat(list(sums)), 0
        for parameter, used in zip(self._parameters, self._used, strict=True):
            if used:
                parameter.grad = flat[at : at + parameter.numel()].view(parameter.shape).to(parameter.dtype)
            at += parameter.numel()

    # Norms, factors and the step.

    def norms(self) -> tuple[Tensor, Tensor]:
        """The 2-norm of each gradient there is, and the places of their parameters; each shape (number,), int64 and float."""
        found = [(place, p.grad) for place, p in zip(self._places, self._parameters, strict=True) if p.grad is not None]
        if not found:
            return torch.empty(0, dtype=torch.int64), torch.empty(0)
        return torch.stack([place for place, _ in found]), torch.stack([torch.linalg.vector_norm(g) for _, g in found])

    def scale(self, factor: float | Tensor) -> None:
        """Multiply the gradient."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor if isinstance(factor, float) else factor.to(parameter.device))

    def step(self, step: int) -> None:
        """Apply the gradient and forget it."""
        factor = self._schedule(step)
        for group, initial in zip(self._groups, self._initial_lrs, strict=True):
            group["lr"] = initial * factor
        if self.optimizer is not None:
            self.optimizer.step()
        self.forget_gradients()

    def forget_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


def total_norm(parts: Iterable[tuple[Tensor, Tensor]]) -> float:
    """One norm of (places, norms), taken in model order as `torch.nn.utils.clip_grad_norm_` takes it."""
    places, norms = (torch.cat(both) for both in zip(*[(places.cpu(), norms.cpu()) for places, norms in parts], strict=True))
    return float(torch.linalg.vector_norm(norms[places.argsort()])) if norms.numel() else 0.0


def clip_factor(norm: float, most: float) -> Tensor:
    """What `torch.nn.utils.clip_grad_norm_` multiplies gradients by: a float32 of at most 1, shape ()."""
    return torch.clamp(most / (torch.tensor(norm) + 1e-6), max=1.0)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _cut(flat: Tensor, holders: int) -> list[Tensor]:
    """Contiguous shards, the first ones longer by an element where they are not equal."""
    return list(flat.tensor_split(holders))
