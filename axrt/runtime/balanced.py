"""Sums whose additions are those of one balanced tree, whoever makes which of them."""

from collections.abc import Sequence
from typing import Any


def balanced_sum(values: Sequence[Any]) -> Any:
    """The sum of neighbours, then of neighbouring sums, and so on.

    Where the first of an aligned stretch of 2**k values is the sum of all of them, and the others
    are None, the result has the same bits.

    Args:
        values: numbers or tensors; None is no addend.
    Returns:
        Their sum; None where all are None.
    """
    level = list(values)
    while len(level) > 1:
        odd = level[-1:] if len(level) % 2 else []
        level = [*map(_sum, level[::2], level[1::2]), *odd]
    return level[0]


def _sum(one: Any, other: Any) -> Any:
    if one is None or other is None:
        return one if other is None else other
    return one + other
