"""A random order of very many numbers, of which any place can be asked for at once: nothing as long
as the data is ever made.

A Feistel network (Luby and Rackoff 1988) is a permutation of the numbers of so many bits, whatever
its round function. What it maps beyond the last number is mapped again until it is not (cycle
walking; Black and Rogaway 2002).
"""

import numpy as np

_ROUNDS = 6
_MASK_64 = (1 << 64) - 1


class Shuffle:
    """A permutation of 0 to number - 1.

    Args:
        number: how many numbers there are, 1 <= number < 2**62.
        key: integers, at least 0, that decide the order.
    """

    def __init__(self, number: int, *key: int) -> None:
        self._number = number
        self._half = (max(number - 1, 1).bit_length() + 1) // 2
        drawn = np.random.default_rng(key).integers(1 << 63, size=_ROUNDS)
        self._keys = [int(one) for one in drawn]

    def __getitem__(self, place: int) -> int:
        """The number at a place, 0 <= place < number."""
        while (place := self._mapped(place)) >= self._number:
            pass
        return place

    def _mapped(self, value: int) -> int:
        half, mask = self._half, (1 << self._half) - 1
        left, right = value >> half, value & mask
        for key in self._keys:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        return left << half | right


def _mixed(value: int) -> int:
    """A hash of 64 bits (the finalizer of SplitMix64, Steele et al. 2014)."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK_64
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK_64
    return value ^ value >> 31
