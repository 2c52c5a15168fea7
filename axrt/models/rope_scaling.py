"""Rotary frequencies for a longer context, as `model.rope_scaling` says it: "linear:FACTOR" or
"llama3:FACTOR,LOW,HIGH,ORIGINAL"."""

from math import isfinite
from typing import NamedTuple

_EXPECTED = (
    "expected 'linear:FACTOR', or 'llama3:FACTOR,LOW,HIGH,ORIGINAL' such as 'llama3:8,1,4,8192', "
    "with factors of at least 1, 0 <= LOW < HIGH, and ORIGINAL tokens of context"
)


class RopeScaling(NamedTuple):
    """How frequencies change."""

    kind: str  # "linear": all are divided by the factor; "llama3": the slow ones
    factor: float  # what they are divided by, at least 1
    # low, high: llama3: a frequency that turns less often than `low` in the original context is
    # divided, one that turns more often than `high` stays
    low: float = 1.0
    high: float = 4.0
    original: int = 8192  # llama3: context before the scaling, in tokens

    @classmethod
    def parse(cls, text: str) -> "RopeScaling | None":
        """What a text says; None for "".

        Raises:
            ValueError: it is none of the two forms.
        """
        if not text:
            return None
        kind, _, values = text.partition(":")
        count = {"linear": 1, "llama3": 4}.get(kind)
        try:
            numbers = [float(one) for one in values.split(",")]
        except ValueError:
            numbers = []
        if len(numbers) != count or not all(map(isfinite, numbers)):
            raise ValueError(_EXPECTED)
        found = cls(kind, numbers[0])
        if kind == "llama3":
            _, low, high, original = numbers
            if original != int(original):
                raise ValueError(_EXPECTED)
            found = cls(kind, numbers[0], low, high, int(original))
        if found.factor < 1 or not 0 <= found.low < found.high or found.original < 1:
            raise ValueError(_EXPECTED)
        return found

    def __str__(self) -> str:
        numbers = self[1:] if self.kind == "llama3" else (self.factor,)
        return f"{self.kind}:{','.join(map(_exact, numbers))}"


def _exact(number: float) -> str:
    """A number that reads back as the same one."""
    return str(int(number)) if number == int(number) else repr(float(number))
