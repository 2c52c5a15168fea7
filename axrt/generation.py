"""Tokens that a model goes on with, one after the other."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from axrt.models.attention import keeping


@dataclass(frozen=True, slots=True)
class Choice:
    """How the next token is chosen.

    Args:
        temperature: number that logits are divided by, at least 0; 0 takes the likeliest token.
        top_k: number of likeliest tokens to choose among; 0: all.
        top_p: the likeliest tokens that have this much of the probability together are chosen
            among (nucleus sampling, Holtzman et al. 2020); 1: all.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0

    def of(self, logits: Tensor, generator: torch.Generator) -> int:
        """Choose.

        Args:
            logits: scores, shape (vocab,).
            generator: random numbers, on the CPU.
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


@torch.inference_mode()
def sample(
    model: nn.Module,
    prompt: Sequence[int],
    number: int,
    context: int,
    choice: Choice,
    generator: torch.Generator,
    *,
    keeps: bool = False,
) -> Iterator[int]:
    """Choose tokens, one after the other.

    Args:
        model: network from tokens, shape (1, length), int64, to logits, shape (1, length, vocab).
        prompt: tokens to go on from, at least one.
        number: number of tokens to choose.
        context: number of last tokens that the model looks at.
        choice: how to choose.
        generator: random numbers of the choices, on the CPU.
        keeps: the model's layers keep keys and values (`keeping`), so that a token alone is fed
            while all tokens are in the context. Behind that all are fed each time.
    """
    tokens = list(prompt)
    with ExitStack() as kept:
        fed = 0
        for _ in range(number):
            if not keeps or len(tokens) > context or not fed:
                kept.close()
                kept.enter_context(keeping(model, context))
                new = tokens[-context:]
            else:
                new = tokens[fed:]
            logits = model(torch.tensor([new]))[0, -1].float()
            fed = len(tokens)
            tokens.append(choice.of(logits, generator))
            yield tokens[-1]
