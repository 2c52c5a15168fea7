"""Norms of gradients: of each, of all, and the factor that clips them."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from axrt.device.device import is_on_host
from axrt.model.tensor_cuts import Part, Parts

from .shards import Piece

# places of parameters in the model, int64; the norms of their gradients; each shape (number,)
Norms = tuple[Tensor, Tensor]


# What virtual members have of each parameter that they cut, by its place among those stepped.
VirtualParts = Mapping[int, Part]
NO_PARTS: VirtualParts = MappingProxyType({})


def parts_of_pieces(pieces: Sequence[Piece], names: Sequence[str], parts: Parts) -> VirtualParts:
    """What virtual members have of what a rank steps.

    Args:
        names: name of each parameter that there are pieces of.
        parts: what virtual members have of each parameter that they cut, by its name.
    """
    whole = [(place, names[piece.place]) for place, piece in enumerate(pieces) if piece.is_whole]
    return {place: parts[name] for place, name in whole if name in parts}


def of_virtual(found: list[tuple[int, Tensor]], parts: VirtualParts) -> list[tuple[int, Tensor]]:
    """Gradients, each with its place: that of each virtual member where they cut a parameter, so
    that the norm of all is taken of the same norms whoever has them."""
    if not parts:
        return found
    return [
        (place, part)
        for place, gradient in found
        for part in (parts[place].of_all(gradient) if place in parts else [gradient])
    ]


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


def total_slope(parts: Iterable[Norms]) -> Tensor:
    """The sum over all matrices of change times gradient, in model order, shape ()."""
    places, slopes = joined(parts)
    return slopes[places.argsort()].sum()


def clip_factor(norm: Tensor, most: float) -> Tensor:
    """The factor by which `torch.nn.utils.clip_grad_norm_` multiplies gradients: at most 1, shape
    ().

    Args:
        norm: 2-norm of all gradients, shape ().
    """
    return torch.clamp(most / (norm + 1e-6), max=1.0)
