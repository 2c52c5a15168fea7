"""Causal self-attention: grouped heads (Ainslie et al. 2023), rotary positions, documents apart,
and keys and values that are kept while a text is written."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from axrt.config import Model

from .norm import rms_norm
from .rotary import rotated, rotations


class Past:
    """Keys and values of the tokens so far (the key-value cache) of one layer.

    Args:
        context: most tokens.
    """

    def __init__(self, context: int) -> None:
        self._context = context
        self.length = 0
        self._kept: tuple[Tensor, Tensor] | None = None

    def with_next(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keep those of the next tokens. Returns those of all, each of shape (batch, heads, length,
        head_width)."""
        if self._kept is None:
            batch, heads, _, features = key.shape
            shape = (batch, heads, self._context, features)
            self._kept = key.new_empty(shape), value.new_empty(shape)
        end = self.length + key.shape[2]
        for kept, new in zip(self._kept, (key, value), strict=True):
            kept[:, :, self.length : end] = new
        self.length = end
        keys, values = self._kept
        return keys[:, :, :end], values[:, :, :end]


class Remembers(nn.Module):
    """A layer, or part of one, that may go on behind the tokens of an earlier call.

    Attributes:
        past: what it keeps of the tokens so far; None: each call begins anew.
    """

    def __init__(self) -> None:
        super().__init__()
        self.past: Past | None = None


class Attention(Remembers):
    """Mixes each token's features with those of the tokens before it; features keep their shape
    (batch, length, width).
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.features, self.dropout = model.features_of_a_head, model.dropout
        self.heads, self.shared = model.heads, model.kv_heads or model.heads
        within = self.heads * self.features
        sizes = (within, self.shared * self.features, self.shared * self.features)
        self.sizes = sizes
        self.project_in = nn.Linear(model.width, sum(sizes), bias=model.bias in ("qkv", "all"))
        self.project_out = nn.Linear(within, model.width, bias=model.bias == "all")
        self.query_norm = rms_norm(self.features, model.norm_eps) if model.qk_norm else None
        self.key_norm = rms_norm(self.features, model.norm_eps) if model.qk_norm else None
        nn.init.normal_(self.project_in.weight, std=model.width**-0.5)
        nn.init.zeros_(self.project_out.weight)
        for linear in (self.project_in, self.project_out):
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
        self.turns = model.positions == "rotary"
        if self.turns:
            cos, sin = rotations(model)
            self.register_buffer("cos", cos, persistent=False)
            self.register_buffer("sin", sin, persistent=False)

    def forward(self, features: Tensor, documents: Tensor | None = None) -> Tensor:
        """Attend.

        Args:
            features: shape (batch, length, width).
            documents: number of each token's document, shape (batch, length), int64; None: all are
                of one.
        """
        batch, length, _ = features.shape
        query, key, value = (
            part.view(batch, length, -1, self.features).transpose(1, 2)
            for part in self.project_in(features).split(self.sizes, dim=-1)
        )
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query).to(value), self.key_norm(key).to(value)
        before = self.past.length if self.past else 0
        if self.turns:
            query, key = self._turned(query, before), self._turned(key, before)
        if self.past is not None:
            key, value = self.past.with_next(key, value)
        mask = _mask(length, before, documents, features.device)
        mixed = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=mask is None and length > 1,
            enable_gqa=self.shared != self.heads,
        )
        out: Tensor = self.project_out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out

    def _turned(self, heads: Tensor, before: int) -> Tensor:
        rows = slice(before, before + heads.shape[2])
        return rotated(heads, self.cos[rows], self.sin[rows])  # type: ignore[index]


def _mask(
    length: int, before: int, documents: Tensor | None, device: torch.device
) -> Tensor | None:
    """Which tokens each token sees, where that is not all up to itself; one token alone sees all.

    Args:
        documents: number of each token's document; None: all are of one.
    Returns:
        Booleans, shape (batch, 1, length, before + length); () dimensions of one document are left
        away; None: causal.
    """
    if documents is not None:
        return (documents[:, None, :, None] == documents[:, None, None, :]).tril()
    if before == 0 or length == 1:
        return None
    ones = torch.ones(length, before + length, dtype=torch.bool, device=device)
    return ones.tril(before)
