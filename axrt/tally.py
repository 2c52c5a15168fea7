"""What ranks report besides the messages that tasks wait for: collected under a key until whoever asked has all of it."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from axrt.errors import DataError


class Losses(NamedTuple):
    """Of microbatches in order, from one replica.

    Args:
        values: means, or sums where there are weights.
        weights: of the microbatches, None where the loss function gives none.
    """

    values: list[float]
    weights: list[float] | None


def mean_loss(replicas: list[Losses]) -> float:
    """The mean over all microbatches, in float64 and in order; nan where there are none."""
    values = [value for losses in replicas for value in losses.values]
    weight = total_weight(replicas)
    return sum(values) / (len(values) if weight is None else weight) if values else float("nan")


def total_weight(replicas: list[Losses]) -> float | None:
    """The sum of all weights; None where losses are means."""
    weighted = [losses.weights for losses in replicas if losses.weights is not None]
    if weighted and len(weighted) < len(replicas):
        raise DataError("the loss function gave (sum, weight) for some microbatches and a mean for others; expected one of the two for all")
    total = sum(weight for weights in weighted for weight in weights)
    if weighted and not 0 < total < float("inf"):
        raise DataError(f"the weights of all losses sum to {total}; expected a positive number")
    return total if weighted else None


@dataclass(slots=True)
class Collected:
    """What has come under one key.

    Args:
        wanted: how many parts there will be; None while nobody has asked.
    """

    wanted: int | None = None
    parts: dict[Hashable, Any] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        return self.wanted is not None and len(self.parts) >= self.wanted

    def in_order(self) -> list[Any]:
        return [self.parts[part] for part in sorted(self.parts)]  # type: ignore[type-var]


class Tally:
    """Everything that is not whole, or that nobody has asked for yet; what is both belongs to who asked."""

    def __init__(self) -> None:
        self._open: dict[Hashable, Collected] = {}

    def hear(self, key: Hashable, part: Hashable, payload: Any) -> None:
        """Part of what is collected under a key has come."""
        self._open.setdefault(key, Collected()).parts[part] = payload
        self._let_go(key)

    def claim(self, key: Hashable, wanted: int) -> Collected:
        """What is collected under a key, to be filled as messages come."""
        collected = self._open.setdefault(key, Collected())
        collected.wanted = wanted
        self._let_go(key)
        return collected

    def _let_go(self, key: Hashable) -> None:
        if self._open[key].whole:
            del self._open[key]
