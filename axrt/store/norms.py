"""Norms of gradients: of each, of all, and the factor that clips them."""

from collections.abc import Iterable

import torch
from torch import Tensor

from axrt.device.device import is_on_host

# places of parameters in the model, int64; the norms of their gradients; each shape (number,)
Norms = tuple[Tensor, Tensor]


def norms_of(gradients: list[Tensor]) -> list[Tensor]:
    """The 2-norm of each gradient, as torch's own clipping takes it on their device: the order of
    its sums, and so the last bits, differ."""
    if all(map(is_on_host, gradients)):
        return [torch.linalg.vector_norm(gradient) for gradient in gradients]
    return list(torch._foreach_norm(gradients))


def joined(parts: Iterable[Norms]) -> Norms:
    """The norms of several buckets or stages as one pair of tensors, of the widest type among
    them."""
    places, norms = zip(*parts, strict=True)
    # Without those that have none, whose type says nothing.
    return torch.cat(places), torch.cat([of_part for of_part in norms if len(of_part)] or norms[:1])


def total_norm(parts: Iterable[Norms]) -> Tensor:
    """The 2-norm of all gradients from the norms of each, shape ().

    It is taken in model order, as `torch.nn.utils.clip_grad_norm_` takes it. The pieces of a
    parameter that shards cut come by size: the order in which ranks tell of theirs is not the same
    in every run.
    """
    places, norms = joined(parts)
    by_size = norms.argsort()
    order = by_size[places[by_size].argsort(stable=True)]
    norm: Tensor = torch.linalg.vector_norm(norms[order])
    return norm


def clip_factor(norm: Tensor, most: float) -> Tensor:
    """The factor by which `torch.nn.utils.clip_grad_norm_` multiplies gradients: at most 1, shape
    ().

    Args:
        norm: 2-norm of all gradients, shape ().
    """
    return torch.clamp(most / (norm + 1e-6), max=1.0)
