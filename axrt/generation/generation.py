"""Tokens that a model goes on with: how the next one is chosen, layers that remember those so far,
and what they are fed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from axrt.device.device import CPU
from axrt.models.attention import Past, Remembers


@dataclass(frozen=True, slots=True)
class Choice:
    """How the next token is chosen."""

    # number that logits are divided by, at least 0; 0 takes the likeliest token
    temperature: float = 0.8
    top_k: int = 0  # number of likeliest tokens to choose among; 0: all
    # the likeliest tokens that have this much of the probability together are chosen among
    # (nucleus sampling, Holtzman et al. 2020); 1: all.
    top_p: float = 1.0

    def of(self, logits: Tensor, generator: torch.Generator) -> int:
        """Choose.

        Args:
            logits: scores, shape (vocab,).
        """
        if self.temperature == 0:
            return int(logits.argmax())
        if self.top_k:
            least = logits.topk(min(self.top_k, logits.numel())).values[-1]
            logits = logits.masked_fill(logits < least, float("-inf"))
        likely = (logits / self.temperature).softmax(0)
        if self.top_p < 1:
            likely = _nucleus(likely, self.top_p)
        return int(torch.multinomial(likely, 1, generator=generator))


def _nucleus(likely: Tensor, share: float) -> Tensor:
    """Probabilities, with 0 for all but the likeliest tokens that have that share together."""
    ordered, places = likely.sort(descending=True)
    before = ordered.cumsum(0) - ordered
    return likely.index_fill(0, places[before >= share], 0.0)


class Stage:
    """Consecutive layers of a model that writes several texts, each in a slot. The layers keep
    keys and values of each (the key-value cache).

    Args:
        layers: the layers, on one device and in evaluation mode.
        context: most tokens of a text that they look at.
    """

    def __init__(self, layers: nn.Module, context: int, device: torch.device = CPU) -> None:
        self._layers, self._context, self.device = layers, context, device
        self._remembering = [of for of in layers.modules() if isinstance(of, Remembers)]
        self._pasts: dict[int, list[Past]] = {}

    def forward(self, slot: int, value: Any, is_fresh: bool) -> Any:
        """Compute what follows the tokens so far."""
        if is_fresh:
            self._pasts[slot] = [Past(self._context) for _ in self._remembering]
        for module, past in zip(self._remembering, self._pasts[slot], strict=True):
            module.past = past
        return self._layers(value)


class Text:
    """A text that is being written.

    Args:
        prompt: tokens that it begins with, at least one.
        keeps: the model's layers keep keys and values, so that a token alone is fed while all
            tokens are in the context. Behind that all are fed each time.
    """

    def __init__(self, prompt: Sequence[int], number: int, context: int, keeps: bool) -> None:
        self._tokens, self._left = list(prompt), number
        self._context, self._keeps = context, keeps
        self._fed = 0

    def feed(self) -> tuple[Tensor, bool]:
        """What the model is fed next, shape (1, length), int64; and whether it begins anew."""
        is_fresh = not self._keeps or len(self._tokens) > self._context or not self._fed
        new = self._tokens[-self._context :] if is_fresh else self._tokens[self._fed :]
        self._fed = len(self._tokens)
        return torch.tensor([new]), is_fresh

    def add(self, token: int) -> bool:
        """Add a token. Returns True where that was the last one."""
        self._tokens.append(token)
        self._left -= 1
        return self._left == 0
