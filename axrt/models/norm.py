"""Norms in the type of their weights, float32, whatever type comes in.

For bfloat16 inputs there is no fused kernel with float32 weights.
"""

from torch import Tensor, nn

from axrt.config import Model


class Norm(nn.RMSNorm):
    """RMSNorm (Zhang and Sennrich 2019)."""

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(features.to(self.weight.dtype))


class LayerNorm(nn.LayerNorm):
    """LayerNorm with a bias (Ba et al. 2016)."""

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(features.to(self.weight.dtype))


def norm_of(model: Model) -> nn.Module:
    """The norm of a token's features that `[model]` names."""
    if model.norm == "layer":
        return LayerNorm(model.width, eps=model.norm_eps or 1e-5)
    return rms_norm(model.width, model.norm_eps)


def rms_norm(features: int, eps: float) -> Norm:
    """RMSNorm; `eps` = 0 is torch's own default, the smallest step of float32."""
    return Norm(features, eps=eps or None)
