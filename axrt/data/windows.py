"""Sequences cut from a row of tokens. Sample n depends on (seed, n) alone, so any layout of ranks
sees the same order."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from axrt.errors import DataError

from .shuffle import Shuffle
from .tokens import Mapped, Tokens, unknown

Item = tuple[Tensor, Tensor]


class Windows:
    """All samples of all epochs of one row of tokens.

    Args:
        tokens: integers, shape (number,); more than `context` where samples are drawn.
        context: number of tokens of a sequence.
        seed: run seed from which the order of samples is derived, 0 <= seed < 2**63.
        vocab: number of different tokens that the model knows.
    Attributes:
        per_epoch: number of samples of an epoch, at least 1.
    """

    def __init__(self, tokens: Tokens, context: int, seed: int, vocab: int) -> None:
        self._tokens = tokens
        self._context = context
        self._seed = seed
        self._vocab = vocab
        self.per_epoch = max(1, (len(tokens) - 1) // context - 1)
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def microbatch(self, first: int, size: int) -> Item:
        """A microbatch of consecutive samples.

        Args:
            first: number of its first sample, over all epochs.
            size: number of samples.
        Returns:
            Inputs and, one token later, targets; each of shape (size, context), int64.
        Raises:
            DataError: it has a token that the model does not know.
        """
        return self._items([self._start_of(sample) for sample in range(first, first + size)])

    def evenly(self, microbatches: int, size: int) -> Iterator[Item]:
        """Microbatches from evenly spaced places, the same ones every time.

        Args:
            microbatches: number of microbatches.
            size: number of samples of each.
        """
        starts = np.linspace(0, len(self._tokens) - 1 - self._context, microbatches * size).astype(
            np.int64
        )
        for block in starts.reshape(microbatches, size):
            yield self._items([int(start) for start in block])

    def __getstate__(self) -> dict[str, Any]:
        # a cache; a copy begins with its own
        kept = {key: value for key, value in self.__dict__.items() if key != "_order"}
        return {**kept, "_tokens": Mapped.of(self._tokens) or self._tokens}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if isinstance(self._tokens, Mapped):
            self._tokens = self._tokens.tokens()
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def _items(self, starts: list[int]) -> Item:
        rows = np.stack([self._window(start) for start in starts])
        token = unknown(rows, self._vocab)
        if token is not None:
            raise DataError(
                f"{getattr(self._tokens, 'filename', None) or 'the data'} has token {token}; "
                "expected 0 or more and less than "
                f"model.vocab = {self._vocab}. Set it to what the tokenizer has"
            )
        return _split(rows)

    def _start_of(self, sample: int) -> int:
        epoch, place = divmod(sample, self.per_epoch)
        offset, order = self._order(epoch)
        return order[place] * self._context + offset

    def _shuffled(self, epoch: int) -> tuple[int, Shuffle]:
        random = np.random.default_rng([self._seed, epoch])
        room = len(self._tokens) - 1 - self.per_epoch * self._context
        offset = int(random.integers(min(self._context, room + 1)))
        return offset, Shuffle(self.per_epoch, self._seed, epoch)

    def _window(self, start: int) -> Tokens:
        return self._tokens[start : start + self._context + 1]


def _split(rows: Tokens) -> Item:
    tokens = torch.from_numpy(rows.astype(np.int64))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
