"""Small models that are hard on a pipeline."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from axrt import Config, LayerSpec, PipelineModule
from axrt.models.gpt import gpt


class Block(nn.Module):
    """A residual block with dropout and a norm."""

    def __init__(self, width: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, value: Tensor) -> Tensor:
        hidden: Tensor = self.dropout(self.down(functional.gelu(self.up(self.norm(value)))))
        return value + hidden


class Thin(nn.Module):
    """A residual block of few operators, with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(width, width), nn.Dropout(0.1)

    def forward(self, value: Tensor) -> Tensor:
        hidden: Tensor = self.dropout(self.linear(value))
        return value + hidden


def perceptron(
    layers: int = 8, width: int = 16, classes: int = 5, block: type[nn.Module] = Block
) -> PipelineModule:
    """Dropout in every layer: right seeds or wrong bits."""
    body = [LayerSpec(block, width) for _ in range(layers - 1)]
    return PipelineModule([*body, LayerSpec(nn.Linear, width, classes)], functional.cross_entropy)


class Spread(nn.Module):
    """Returns everything that may travel: a dict with integers, booleans, None, views with odd
    strides and a tensor used twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, value: Tensor) -> dict[str, object]:
        hidden = self.linear(value)
        return {
            "hidden": hidden.t(),
            "mask": hidden.detach() > 0,
            "places": torch.arange(value.shape[0]),
            "nothing": None,
            "pair": (hidden[:, ::2], hidden.mean().expand(3)),
            "unused": hidden * 2,
            "scale": 0.5,
        }


class Gather(nn.Module):
    """Takes a `Spread` apart again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, value: dict[str, Any]) -> Tensor:
        half, mean = value["pair"]
        assert value["nothing"] is None
        kept = torch.where(value["mask"], value["hidden"].t(), value["hidden"].t() * value["scale"])
        mixed: Tensor = self.linear(kept[value["places"]])
        shift: Tensor = half.sum() * mean[:1]
        return mixed + shift


def motley(width: int = 12, classes: int = 4) -> PipelineModule:
    """Structured activations, an in-place function first in its stage, frozen parameters, layers
    without parameters."""
    frozen = nn.Linear(width, width, bias=False).requires_grad_(False)
    with torch.no_grad():
        frozen.weight.copy_(torch.eye(width) * 0.9)
    return PipelineModule(
        [
            LayerSpec(nn.Linear, width, width),
            LayerSpec(Spread, width),
            LayerSpec(Gather, width),
            functional.relu_,
            frozen,
            LayerSpec(nn.Dropout, 0.2),
            LayerSpec(nn.BatchNorm1d, width),
            LayerSpec(nn.Linear, width, classes),
        ],
        functional.cross_entropy,
    )


class Attends(nn.Module):
    """Attention of two heads with the mask that came along, (batch, 1, time, time), which it hands
    on."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, value: tuple[Tensor, dict[str, Any]]) -> tuple[Tensor, dict[str, Any]]:
        hidden, extra = value
        batch, time, width = hidden.shape
        query, key, found = (
            self.into(hidden).view(batch, time, 2, 3 * width // 2).transpose(1, 2).chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(query, key, found, attn_mask=extra["mask"])
        assert extra["scale"].shape == (batch, 1)
        return hidden + self.out(mixed.transpose(1, 2).reshape(batch, time, width)) * extra[
            "scale"
        ].unsqueeze(2), extra


def masked(width: int = 12) -> PipelineModule:
    """Attention whose mask travels through every stage, and one number a sample as the target:
    sizes of 1 behind larger ones."""

    def embedded(given: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Any]]:
        hidden, lengths = given
        places = torch.arange(hidden.shape[1])
        return hidden, {
            "mask": (places <= lengths.view(-1, 1, 1, 1)) & (places <= places.view(-1, 1)),
            "scale": lengths.float() / 4,
        }

    def pooled(value: tuple[Tensor, dict[str, Any]]) -> Tensor:
        return value[0].mean(1)

    return PipelineModule(
        [
            embedded,
            *(LayerSpec(Attends, width) for _ in range(5)),
            pooled,
            LayerSpec(nn.Linear, width, 1),
        ],
        functional.mse_loss,
    )


def masked_batches(microbatches: int, width: int = 12, batch: int = 3, time: int = 5) -> Any:
    """Microbatches of ((hidden, lengths (batch, 1)), targets (batch, 1)), the same for the same
    step."""

    def of_step(step: int) -> list[Any]:
        generator = torch.Generator().manual_seed(2000 + step)
        return [
            (
                (
                    torch.randn(batch, time, width, generator=generator),
                    torch.randint(1, time, (batch, 1), generator=generator),
                ),
                torch.randn(batch, 1, generator=generator),
            )
            for _ in range(microbatches)
        ]

    return of_step


def small_gpt(layers: int = 6) -> PipelineModule:
    """The model of the command line, with dropout, and a layer for each of eight stages."""
    return gpt(
        Config.read(
            {
                "model": {
                    "vocab": 256,
                    "width": 16,
                    "heads": 2,
                    "layers": layers,
                    "context": 8,
                    "dropout": 0.1,
                }
            }
        )
    )
