"""Losses of microbatches, and what they come to."""

from typing import NamedTuple

from axrt.errors import DataError


class Losses(NamedTuple):
    """Of microbatches in order, from one pipe.

    Args:
        values: means, or sums where there are weights.
        weights: of the microbatches, None where the loss function gives none.
    """

    values: list[float]
    weights: list[float] | None


def mean_loss(pipes: list[Losses]) -> float:
    """The mean over all microbatches, in float64 and in order; nan where there are none."""
    values = [value for losses in pipes for value in losses.values]
    weight = total_weight(pipes)
    return sum(values) / (len(values) if weight is None else weight) if values else float("nan")


def total_weight(pipes: list[Losses]) -> float | None:
    """The sum of all weights; None where losses are means."""
    some = [losses for losses in pipes if losses.values]
    weighted = [losses.weights for losses in some if losses.weights is not None]
    check_all_weighted_or_none(len(weighted), len(some))
    total = sum(weight for weights in weighted for weight in weights)
    if weighted and not 0 < total < float("inf"):
        raise DataError(f"the weights of all losses sum to {total}; expected a positive number")
    return total if weighted else None


def check_all_weighted_or_none(weighted: int, losses: int) -> None:
    """Raise `DataError` where some losses have weights and others have none."""
    if 0 < weighted < losses:
        raise DataError(
            "the loss function gave (sum, weight) for some microbatches and a mean for others; "
            "expected one of the two for all"
        )
