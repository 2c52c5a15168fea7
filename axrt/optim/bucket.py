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

from axrt.scheduler.bucket import Holder

from .held import Held

OptimizerFactory = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
LrSchedule = Callable[[int], float]
Part = tuple[Tensor, list[bool] | None]  # a shard of a gradient; which parameters have one, None where all do
Norms = tuple[Tensor, Tensor]  # places of parameters in the model, int64; the norms of their gradients; each shape (number,)


def constant(step: int) -> float:
    """The schedule that leaves the learning rate as it is."""
    return 1.0


class Bucket:
    """Parameters, who holds them, and the optimizer that the user's factory made for them.

    Args:
        held: the parameters and their holders.
        places: of each parameter in the model, rising numbers.
        me: which of the holders this one is.
        factory: makes the optimizer; parameter groups may carry learning rates of their own.
        schedule: `schedule(step)` is the factor on every group's learning rate.
        device: of the parameters, and of sums where there are none.
    """

    def __init__(
        self, held: Held, places: Sequence[int], me: Holder, factory: OptimizerFactory, schedule: LrSchedule, device: torch.device
    ) -> None:
        self.named, self.called = held.named, held.called
        self.holders, self.me = held.holders, me
        self._counts = held.counts
        self._parameters = [parameter for _, parameter in held.named]
        self._places = torch.tensor(places, dtype=torch.int64)
        self._schedule, self._device = schedule, device
        self.optimizer = factory([(name, p) for name, (_, p) in zip(held.called, held.named, strict=True)]) if held.named else None
        self.initial_groups = [dict(group, params=None) for group in self.groups]
        self._used = [True] * len(self._parameters)
        self._buffer: Tensor | None = None
        self._total: Tensor | None = None

    @property
    def shared(self) -> bool:
        """There is someone to add up with."""
        return len(self.holders) > 1

    @property
    def groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups if self.optimizer else []

    @property
    def lr(self) -> float | None:
        """Of the first parameter group, in the last step; None where there is none."""
        return float(self.groups[0]["lr"]) if self.groups else None

    # Adding up. Both buffers stay from step to step, since fresh memory costs more than the sums. Neither is written to while the
    # network may still read it: this holder packs again after its own step, for which it needed a sum from everyone whom it had sent
    # a part; and it adds up again when everyone has sent a part of the next step, for which they needed its sum.

    def parts(self) -> list[Part]:
        """This holder's gradient, cut into a shard for each holder; the gradient is given away."""
        used = [parameter.grad is not None for parameter in self._parameters]
        for parameter, of_parameter in zip(self._parameters, self._views(), strict=True):
            if parameter.grad is None:
                of_parameter.zero_()
            else:
                of_parameter.copy_(parameter.grad)
        self.forget_gradients()
        mask = None if all(used) else used
        return [(shard, mask) for shard in self._flat.tensor_split(len(self.holders))]

    def add_up(self, parts: Sequence[Part]) -> Tensor:
        """The sum of the parts of this holder's shard, in the order of holders."""
        (first, _), (second, _), *others = parts
        if self._total is None:
            self._total = torch.empty_like(first)
        torch.add(first, second, out=self._total)
        for shard, _ in others:
            self._total += shard
        masks = [mask for _, mask in parts if mask is not None]
        self._used = [len(masks) < len(parts) or any(used) for used in zip(*masks, strict=True)] or [True] * len(self._parameters)
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
            self._buffer = torch.empty(sum(parameter.numel() for parameter in self._parameters), dtype=wide, device=self._device)
        return self._buffer

    def _views(self) -> list[Tensor]:
        """The place of each parameter in the row."""
        pieces = torch.split(self._flat, [parameter.numel() for parameter in self._parameters]) if self._parameters else ()
        return [piece.view(parameter.shape) for piece, parameter in zip(pieces, self._parameters, strict=True)]

    # Norms, factors and the step.

    def norms(self) -> Norms:
        """The norms of the gradients there are, on their way to the CPU; of tied weights only with the layer that counts."""
        found = [(place, p.grad) for place, p in zip(self._places, self._parameters, strict=True) if p.grad is not None and self._counts]
        if not found:
            return torch.empty(0, dtype=torch.int64), torch.empty(0)
        norms = torch.stack([torch.linalg.vector_norm(gradient) for _, gradient in found])
        return torch.stack([place for place, _ in found]), norms.to("cpu", non_blocking=True)

    def scale(self, factor: float | Tensor) -> None:
        """Multiply the gradient."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def step(self, step: int) -> None:
        """Apply the gradient and forget it."""
        factor = self._schedule(step)
        for group, initial in zip(self.groups, self.initial_groups, strict=True):
            group["lr"] = initial["lr"] * factor
        if self.optimizer is not None:
            self.optimizer.step()
        self.forget_gradients()

    def forget_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


def joined(parts: Iterable[Norms]) -> Norms:
    """Norms of several buckets or stages as one."""
    places, norms = zip(*parts, strict=True)
    return torch.cat(places), torch.cat([of_part.to(norms[0].dtype) for of_part in norms])


def total_norm(parts: Iterable[Norms]) -> Tensor:
    """One norm of norms, taken in model order as `torch.nn.utils.clip_grad_norm_` takes it; shape ()."""
    places, norms = joined(parts)
    norm: Tensor = torch.linalg.vector_norm(norms[places.argsort()])
    return norm


def clip_factor(norm: Tensor, most: float) -> Tensor:
    """What `torch.nn.utils.clip_grad_norm_` multiplies gradients by: at most 1, shape ()."""
    return torch.clamp(most / (norm + 1e-6), max=1.0)
