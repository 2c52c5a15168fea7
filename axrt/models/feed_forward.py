"""The feed-forward network of a block: ReLU, its square (So et al. 2021), GELU, SiLU, or SwiGLU
(Shazeer 2020)."""

from torch import Tensor, nn
from torch.nn import functional

from axrt.config import Model


class FeedForward(nn.Module):
    """Two linear maps with a function between them; features keep their shape (..., width)."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        bias, width, within = model.bias == "all", model.width, model.features_within
        self.kind = model.feed
        self.up = nn.Linear(width, within, bias=bias)
        self.gate = nn.Linear(width, within, bias=bias) if model.feed == "swiglu" else None
        self.down = nn.Linear(within, width, bias=bias)
        for linear in (self.up, self.gate):
            if linear is not None:
                nn.init.normal_(linear.weight, std=width**-0.5)
        nn.init.zeros_(self.down.weight)
        for linear in (self.up, self.gate, self.down) if bias else ():
            if linear is not None:
                nn.init.zeros_(linear.bias)

    def forward(self, features: Tensor) -> Tensor:
        out: Tensor = self.down(self._between(features))
        return out

    def _between(self, features: Tensor) -> Tensor:
        hidden: Tensor = self.up(features)
        if self.gate is not None:
            return functional.silu(self.gate(features)) * hidden
        if self.kind in ("relu", "silu"):
            return functional.relu(hidden) if self.kind == "relu" else functional.silu(hidden)
        if self.kind == "relu2":
            return functional.relu(hidden).square()
        return functional.gelu(hidden, approximate="tanh" if self.kind == "gelu-tanh" else "none")
