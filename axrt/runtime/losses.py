"""Losses of microbatches, and their mean over a step."""

# The mean is taken over microbatches in their order, in float64, on every rank alike: an order by
# arrival would give other last bits from run to run. Where a loss has a weight, such as its number
# of tokens, the gradient of a step is divided by the sum of all weights, so a step waits for all
# losses.

from typing import NamedTuple

from axrt.errors import DataError
from axrt.runtime.balanced import balanced_sum

IGNORED = -100  # a target that does not count, as torch's cross entropy has it


class Losses(NamedTuple):
    """The losses of one pipe's microbatches, in order."""

    values: list[float]  # means, or sums where there are weights
    # weights of the microbatches; None where the loss function gives none
    weights: list[float] | None
    # running numbers of the microbatches, where replicas share them; None: they are those of
    # the pipe, in order
    numbers: list[int] | None = None


def mean_loss(pipes: list[Losses]) -> float:
    """The mean over all microbatches, summed in float64 and in order; nan where there are none.

    Raises:
        DataError: some microbatches have weights and others none, or the weights do not sum to a
            positive number.
    """
    values = _in_order(pipes, [value for losses in pipes for value in losses.values])
    weight = total_weight(pipes)
    return sum(values) / (len(values) if weight is None else weight) if values else float("nan")


def losses_of_members(members: list[Losses]) -> Losses:
    """The losses of one pipe's microbatches, from what each member of a team has of its tokens."""
    weighted = [losses.weights for losses in members if losses.weights is not None]
    check_all_weighted_or_none(len(weighted), len(members))
    weights = [balanced_sum(of) for of in zip(*weighted, strict=True)] if weighted else None
    share = len(members) if weights is None else 1
    of_each = zip(*(losses.values for losses in members), strict=True)
    means = [balanced_sum(of) / share for of in of_each]
    return Losses(means, weights, members[0].numbers)


def total_weight(pipes: list[Losses]) -> float | None:
    """The sum of all weights; None where losses are means.

    Raises:
        DataError: some microbatches have weights and others none, or the weights do not sum to a
            positive number.
    """
    some = [losses for losses in pipes if losses.values]
    weighted = [losses.weights for losses in some if losses.weights is not None]
    check_all_weighted_or_none(len(weighted), len(some))
    total = sum(_in_order(some, [weight for weights in weighted for weight in weights]))
    if weighted and not 0 < total < float("inf"):
        raise DataError(f"the weights of all losses sum to {total}; expected a positive number")
    return total if weighted else None


def _in_order(pipes: list[Losses], values: list[float]) -> list[float]:
    """The values in the order of microbatches: of all pipes together where they share, else pipe by
    pipe."""
    numbers = [number for losses in pipes for number in losses.numbers or ()]
    if not numbers or not values:
        return values
    return [value for _, value in sorted(zip(numbers, values, strict=True))]


def check_all_weighted_or_none(weighted: int, losses: int) -> None:
    """Check that all losses have weights, or none.

    Raises:
        DataError: some have weights and others none.
    """
    if 0 < weighted < losses:
        raise DataError(
            "the loss function gave (sum, weight) for some microbatches and a mean for others; "
            "expected one of the two for all"
        )
