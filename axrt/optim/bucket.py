"""A bucket: parameters of one stage that are reduced and stepped as one.

Where several ranks (or several layers, of tied weights) hold it, each holder sends every other its *part* of the gradient,
cut into one *shard* a holder; who owns a shard adds the parts up in the order of holders, in float32 or better, and sends
the *sum* back. That is the volume of a ring, needs no operator of MPI, and has one order of summation
whatever the timing, the sizes of buckets and the library.
"""

import functools
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
        self._buffer: Tensor | None = None
        self._total: Tensor | None = None

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups if self.optimizer else []

    @property
    def lr(self) -> float | None:
        """Of the first parameter group, in the last step; None where there is none."""
        return float(self._groups[0]["lr"]) if self._groups else None

    # Adding up. Both buffers stay from step to step, since fresh memory costs more than the sums. Neither is written to while the
    # network may still read it: this holder packs again after its own step, for which it needed a sum from everyone whom it had sent
    # a part; and it adds up again when everyone has sent a part of the next step, for which they needed its sum.

    def parts(self, holders: int) -> list[Part]:
        """This holder's gradient, cut into a shard for each holder; the gradient is given away."""
        used = [parameter.grad is not None for parameter in self._parameters]
        for parameter, of_parameter in zip(self._parameters, self._views(), strict=True):
            if parameter.grad is None:
                of_parameter.zero_()
            else:
                of_parameter.copy_(parameter.grad)
        self.forget_gradients()
        mask = None if all(used) else torch.tensor(used, dtype=torch.uint8)
        return [(shard, mask) for shard in self._flat.tensor_split(holders)]

    def add_up(self, parts: Sequence[Part]) -> Tensor:
        """The sum of the parts of this holder's shard, in the order of holders."""
        (first, _), (second, _), *others = parts
        if self._total is None:
            self._total = torch.empty_like(first)
        torch.add(first, second, out=self._total)
        for shard, _ in others:
            self._total += shard
        masks = [torch.ones(len(self._parameters), dtype=torch.uint8) if mask is None else mask.cpu() for _, mask in parts]
        self._used = torch.stack(masks).any(dim=0).tolist()
        return self._total

    def take_sums(self, sums: Sequence[Tensor]) -> None:
        """Make the sums of all shards the gradient; a parameter that no holder has used keeps none."""
        for shard, of_holder in zip(self._flat.tensor_split(len(sums)), sums, strict=True):
            shard.copy_(of_holder)
        for parameter, of_parameter, used in zip(self._parameters, self._views(), self._used, strict=True):
            if used:
                parameter.grad = of_parameter.to(parameter.dtype)

    @property
    def _flat(self) -> Tensor:
        """All gradients in a row, float32 or better."""
        if self._buffer is None:
            wide = functools.reduce(torch.promote_types, [parameter.dtype for parameter in self._parameters], torch.float32)
            device = self._parameters[0].device if self._parameters else None
            self._buffer = torch.empty(sum(parameter.numel() for parameter in self._parameters), dtype=wide, device=device)
        return self._buffer

    def _views(self) -> list[Tensor]:
        """The place of each parameter in the row."""
        pieces = torch.split(self._flat, [parameter.numel() for parameter in self._parameters]) if self._parameters else ()
        return [piece.view(parameter.shape) for piece, parameter in zip(pieces, self._parameters, strict=True)]

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
