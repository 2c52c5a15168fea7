"""What values of options may be: several numbers, costs of stages, policies."""

from collections.abc import Iterable
from math import isfinite
from typing import Any

import click

from axrt.scheduler.policies import is_own


class Numbers(click.ParamType):  # type: ignore[type-arg]
    """A fixed count of numbers with a mark between them, such as 1,1,1 or 2:1.3."""

    def __init__(self, count: int, mark: str) -> None:
        self._count, self._mark = count, mark
        self.name = mark.join("abc"[:count]).upper()

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(float(word) for word in value.split(self._mark))
        except ValueError:
            numbers = ()
        if len(numbers) != self._count or min(numbers) < 0 or not all(map(isfinite, numbers)):
            self.fail(
                f"{value!r}; expected {self._count} numbers with {self._mark!r} between them, none "
                "below 0",
                param,
                ctx,
            )
        return numbers


class StageCosts(click.ParamType):  # type: ignore[type-arg]
    """Costs of each stage, such as 1,1,1/1,1,1/2,2,2."""

    name = "A,B,C/..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[tuple[float, ...], ...]:
        if isinstance(value, tuple):
            return value
        return tuple(Numbers(3, ",").convert(one, param, ctx) for one in value.split("/"))


class PolicyName(click.Choice[str]):
    """The name of a policy, in small letters or not, or the module and class of one of the user's
    own.
    """

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__(tuple(names), case_sensitive=False)

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return value if is_own(value) else super().convert(value, param, ctx)
