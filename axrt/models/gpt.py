"""A GPT as a list of layers: embedding, blocks with rotary positions, head.

Pre-norm residual blocks (Xiong et al. 2020) with RMSNorm (Zhang and Sennrich 2019), rotary
positions (Su et al. 2021), and squared ReLU (So et al. 2021). Residual branches start at zero, so
that the model begins as embedding and head and every block grows from there.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from axrt.config import Config
from axrt.model import LayerSpec, PipelineModule


class Norm(nn.RMSNorm):
    """RMSNorm in the type of its weights, float32, whatever type comes in.

    For bfloat16 inputs there is no fused kernel with float32 weights.
    """

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(features.to(self.weight.dtype))


class Embedding(nn.Module):
    """Maps tokens, shape (batch, context), int64, to features, shape (batch, context, width)."""

    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        features: Tensor = self.tokens(tokens)
        return features


class Attention(nn.Module):
    """Causal self-attention with rotary positions; features keep their shape (batch, context,
    width)."""

    def __init__(self, width: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.project_in = nn.Linear(width, 3 * width, bias=False)
        self.project_out = nn.Linear(width, width, bias=False)
        nn.init.normal_(self.project_in.weight, std=width**-0.5)
        nn.init.zeros_(self.project_out.weight)
        cos, sin = _rotations(context, width // heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        batch, context, width = features.shape
        split = self.project_in(features).view(batch, context, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            self._rotate(query),
            self._rotate(key),
            value,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
        )
        projected: Tensor = self.project_out(mixed.transpose(1, 2).reshape(batch, context, width))
        return projected

    def _rotate(self, heads: Tensor) -> Tensor:
        """Turn each pair of features by its position; `heads` has shape (batch, heads, context,
        features)."""
        first, second = heads.chunk(2, dim=-1)
        cos, sin = self.cos[: heads.shape[2]], self.sin[: heads.shape[2]]  # type: ignore[index]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Block(nn.Module):
    """Attention and a feed-forward network, each around a residual; features keep their shape
    (batch, context, width)."""

    def __init__(self, width: int, heads: int, context: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention_norm, self.feed_norm = Norm(width), Norm(width)
        self.attention = Attention(width, heads, context, dropout)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.up.weight, std=width**-0.5)
        nn.init.zeros_(self.down.weight)

    def forward(self, features: Tensor) -> Tensor:
        features = features + self.dropout(self.attention(self.attention_norm(features)))
        hidden = functional.relu(self.up(self.feed_norm(features))).square()
        out: Tensor = features + self.dropout(self.down(hidden))
        return out


class Head(nn.Module):
    """Maps features, shape (batch, context, width), to logits, shape (batch, context, vocab)."""

    def __init__(self, width: int, vocab: int) -> None:
        super().__init__()
        self.norm = Norm(width)
        self.logits = nn.Linear(width, vocab, bias=False)
        nn.init.normal_(self.logits.weight, std=0.1 * width**-0.5)

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.logits(self.norm(features))
        return logits


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean loss over all tokens, in nats a token, shape ().

    Args:
        logits: scores, shape (batch, context, vocab).
        targets: tokens, shape (batch, context), int64.
    """
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def gpt(config: Config) -> PipelineModule:
    """The GPT whose sizes `[model]` gives."""
    m = config.model
    blocks = [LayerSpec(Block, m.width, m.heads, m.context, m.dropout) for _ in range(m.layers)]
    return PipelineModule(
        [LayerSpec(Embedding, m.vocab, m.width), *blocks, LayerSpec(Head, m.width, m.vocab)],
        loss_fn=cross_entropy,
        partition_method="parameters",
    )


def _rotations(context: int, features: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position x frequency, shape (context, features / 2)."""
    frequencies = 10000.0 ** (-torch.arange(0, features, 2) / features)
    angles = torch.outer(torch.arange(context), frequencies)
    return angles.cos(), angles.sin()
