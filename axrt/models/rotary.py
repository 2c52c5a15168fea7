"""Rotary positions (Su et al. 2021): pairs of features are turned by an angle that grows with the
position."""

import math

import torch
from torch import Tensor

from axrt.config import Model

from .rope_scaling import RopeScaling


def rotations(model: Model) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angle of each position and pair, each of shape (context, head_width /
    2), float32.
    """
    if torch.get_default_device().type == "meta":
        # no number is made there, and torch imports torch._dynamo for sums of no numbers
        size = model.context, model.features_of_a_head // 2
        return torch.empty(size), torch.empty(size)
    angles = torch.outer(torch.arange(model.context), _frequencies(model))
    return angles.cos(), angles.sin()


def rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of features: feature i with feature i + head_width / 2.

    Args:
        heads: queries or keys, shape (batch, heads, length, head_width).
        cos, sin: those of their positions, shape (length, head_width / 2).
    """
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _frequencies(model: Model) -> Tensor:
    """The angle of each pair from one position to the next, shape (head_width / 2,)."""
    features = model.features_of_a_head
    plain = 1.0 / model.rope_theta ** (torch.arange(0, features, 2) / features)
    scaling = RopeScaling.parse(model.rope_scaling)
    if scaling is None:
        return plain
    return plain / scaling.factor if scaling.kind == "linear" else _of_llama_3(plain, scaling)


def _of_llama_3(plain: Tensor, of: RopeScaling) -> Tensor:
    """Frequencies of Llama 3.1: those that turn less than `low` times in the original context
    become slower by the factor, those that turn more than `high` times stay, and between them
    it goes over smoothly."""
    turns = of.original * plain / (2 * math.pi)
    stays = ((turns - of.low) / (of.high - of.low)).clamp(0, 1)
    return plain * (stays + (1 - stays) / of.factor)
