"""Samples of several sources, each as often as its weight says. Sample n depends on the seed, n and
the weights alone."""

from collections.abc import Sequence

import numpy as np

from .shuffle import Shuffle
from .tokens import Tokens
from .windows import Samples

_BLOCK = 1024  # samples: the share of each source is kept within so many
_PARTS = 1_000_000  # of the whole, that a weight is rounded to: sums of integers never drift


class Blend(Samples):
    """All samples of several sources.

    Samples come in blocks. In the first b blocks a source has its share of 1024 b samples, rounded,
    and within a block the order of sources is random. Each source goes on from epoch to epoch by
    itself.

    Args:
        sources: samples of each source.
        weights: weight of each, above 0.
        seed: run seed from which the order is derived, 0 <= seed < 2**63.
    """

    def __init__(self, sources: Sequence[Samples], weights: Sequence[float], seed: int) -> None:
        self._sources, self._seed = list(sources), seed
        self._parts = [max(1, round(weight / sum(weights) * _PARTS)) for weight in weights]
        self._blocks: dict[int, list[tuple[int, int]]] = {}  # the one at hand and one beside it

    def row(self, sample: int) -> Tokens:
        source, number = self.place_of(sample)
        return self._sources[source].row(number)

    def fetch(self, sample: int) -> None:
        source, number = self.place_of(sample)
        self._sources[source].fetch(number)

    def place_of(self, sample: int) -> tuple[int, int]:
        """The source of a sample, and its number there."""
        block = sample // _BLOCK  # about: sums of rounded shares
        while self._begin(block) > sample:
            block -= 1
        while self._begin(block + 1) <= sample:
            block += 1
        if block not in self._blocks:
            kept = {of: order for of, order in self._blocks.items() if abs(of - block) == 1}
            self._blocks = {**kept, block: self._order(block)}
        return self._blocks[block][sample - self._begin(block)]

    def _begin(self, block: int) -> int:
        """The number of the first sample of a block."""
        return sum(self._of_source(source, block) for source in range(len(self._sources)))

    def _of_source(self, source: int, blocks: int) -> int:
        """How many samples of a source the first blocks have."""
        return (blocks * _BLOCK * self._parts[source] + _PARTS // 2) // _PARTS

    def _order(self, block: int) -> list[tuple[int, int]]:
        places = [
            (source, number)
            for source in range(len(self._sources))
            for number in range(self._of_source(source, block), self._of_source(source, block + 1))
        ]
        shuffle = Shuffle(len(places), self._seed, block)
        return [places[shuffle[place]] for place in range(len(places))]

    def spread(self, number: int) -> list[Tokens]:
        """Rows from evenly spaced places of each source, as many as its share; at least one of
        each where there are so many."""
        ends = np.rint(np.cumsum(self._parts) / sum(self._parts) * number).astype(int)
        counts = np.diff(ends, prepend=0)
        return [
            row
            for source, count in zip(self._sources, counts, strict=True)
            for row in source.spread(int(count))
        ]


def blended(sources: Sequence[Samples], weights: Sequence[float], seed: int) -> Samples:
    """The samples of one source, or of several; without weights they come equally often."""
    if len(sources) == 1:
        return sources[0]
    fits = len(weights) == len(sources)
    return Blend(sources, weights if fits else [1.0] * len(sources), seed)
