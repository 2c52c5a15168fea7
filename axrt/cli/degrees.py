"""Degrees of tensor parallelism on the command line, such as 1,2,4."""

from typing import Any

import click


class Degrees(click.ParamType):  # type: ignore[type-arg]
    """Numbers of members with commas between them, each once."""

    name = "1,2,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        words = str(value).split(",")
        degrees = tuple(int(word) for word in words if word.isdecimal())
        if len(degrees) != len(words) or not all(degrees) or len(set(degrees)) < len(degrees):
            self.fail(
                f"{value!r}; expected numbers of members with commas between them, 1 or more and "
                "each once, such as 1,2,4",
                param,
                ctx,
            )
        return degrees
