"""Sequences cut from a row of tokens. Sample n depends on (seed, n) alone, so any layout of ranks
sees the same order."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from axrt.errors import DataError
from axrt.runtime.losses import IGNORED

from .row import Row
from .shuffle import Shuffle
from .tokens import Tokens, counted, unknown

Item = tuple[Tensor, Tensor]


class Samples(ABC):
    """Sequences of tokens, by number and without end."""

    @abstractmethod
    def row(self, sample: int) -> Tokens:
        """A sequence and its next token, shape (context + 1,); one that is not to be predicted is
        masked, see `counted`.

        Raises:
            DataError: it has a token that the model does not know.
        """

    @abstractmethod
    def fetch(self, sample: int) -> None:
        """Have the system begin to read a sequence that is wanted soon. Returns at once."""

    @abstractmethod
    def spread(self, number: int) -> list[Tokens]:
        """So many sequences from evenly spaced places, the same ones every time; errors are those
        of `row`."""

    def microbatch(self, first: int, size: int) -> Item:
        """A microbatch of consecutive samples.

        Returns:
            Inputs and, one token later, targets; each of shape (size, context), int64. Targets
            that do not count are `IGNORED`.
        Raises:
            DataError: it has a token that the model does not know.
        """
        return _split([self.row(sample) for sample in range(first, first + size)])

    def evenly(self, microbatches: int, size: int) -> Iterator[Item]:
        """Microbatches from evenly spaced places, the same ones every time.

        Args:
            size: number of samples of each.
        """
        rows = self.spread(microbatches * size)
        return (_split(rows[first : first + size]) for first in range(0, len(rows), size))


# A large file is read ahead by the system, not by a thread. The order of samples is a function, so
# the pages of those to come can be named (`madvise`). Worker processes did the same for a core.
class Windows(Samples):
    """All samples of all epochs of one row of tokens.

    Args:
        tokens: integers, shape (number,); more than `context` where samples are drawn.
        seed: run seed from which the order of samples is derived, 0 <= seed < 2**63.
        document_end: token that ends a document; what comes after it is not to be predicted. -1:
            there is none.
    Attributes:
        per_epoch: number of samples of an epoch, at least 1.
    """

    def __init__(
        self,
        tokens: Tokens,
        context: int,
        seed: int,
        vocab: int,
        document_end: int = -1,
        masked: bool = False,
    ) -> None:
        self._document_end, self._masked = document_end, masked
        self._row = Row(tokens)
        self._context = context
        self._seed = seed
        self._vocab = vocab
        self.per_epoch = max(1, (len(tokens) - 1) // context - 1)
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def row(self, sample: int) -> Tokens:
        return self._window(self._start_of(sample))

    def fetch(self, sample: int) -> None:
        self._row.fetch(self._start_of(sample), self._context + 1)

    def _start_of(self, sample: int) -> int:
        epoch, place = divmod(sample, self.per_epoch)
        offset, order = self._order(epoch)
        return order[place] * self._context + offset

    def spread(self, number: int) -> list[Tokens]:
        last = len(self._row) - 1 - self._context
        return [self._window(int(start)) for start in np.linspace(0, last, number).astype(np.int64)]

    def __getstate__(self) -> dict[str, Any]:
        # a cache; a copy begins with its own
        return {key: value for key, value in self.__dict__.items() if key != "_order"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def _shuffled(self, epoch: int) -> tuple[int, Shuffle]:
        random = np.random.default_rng([self._seed, epoch])
        room = len(self._row) - 1 - self.per_epoch * self._context
        offset = int(random.integers(min(self._context, room + 1)))
        return offset, Shuffle(self.per_epoch, self._seed, epoch)

    def _window(self, start: int) -> Tokens:
        row = self._row.part(start, self._context + 1)
        found = unknown(row, self._vocab, self._masked)
        if found:
            raise DataError(
                f"{self._row.source} has token {found.token}"
                f"{self._row.where(start + found.place)}; expected 0 or more and less than "
                f"model.vocab = {self._vocab}. Set it to what the tokenizer has"
            )
        return row if self._document_end < 0 else _apart(row, self._document_end)


# Documents are told apart by the token that ends them, in the model itself. The index of a token
# file has their lengths too, but samples are cut from a row and know no place in it.
def _apart(row: Tokens, document_end: int) -> Tokens:
    """The row with the first token of each document masked, but for that of the row."""
    masked = row.astype(np.int64)
    plain = counted(masked)
    follows = np.append(False, plain[:-1] == document_end)
    return np.where(follows, ~plain, masked)


# A token that is not predicted is stored as its complement. A file of masks beside the tokens was
# thought of: it would have to be cut, blended and held out with them, and could be lost.
def _split(rows: Sequence[Tokens]) -> Item:
    tokens = np.stack(rows).astype(np.int64)
    inputs, targets = counted(tokens[:, :-1]), tokens[:, 1:]
    targets = np.where(targets < 0, IGNORED, targets)
    return torch.from_numpy(inputs).contiguous(), torch.from_numpy(targets).contiguous()
