"""Single keys on the command line, `section.key=value`."""

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any, TypeVar, get_type_hints

import click
from click.shell_completion import CompletionItem

_Command = TypeVar("_Command", bound=Callable[..., Any])


def with_overrides(command: _Command) -> _Command:
    """Give a command such arguments, which a shell completes."""
    metavar = "[section.key=value]..."
    return click.argument("overrides", nargs=-1, metavar=metavar, shell_complete=_fitting)(command)


def _fitting(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    return [
        CompletionItem(text, help=meaning)
        for text, meaning in _texts(incomplete.partition("=")[0])
        if text.startswith(incomplete)
    ]


def _texts(key: str) -> Iterator[tuple[str, str]]:
    """Every key, and, for one that is whole, each value of those that it chooses among."""
    from axrt.config import Config

    for section, of in get_type_hints(Config).items():
        for item in fields(of):
            name, meaning = f"{section}.{item.name}", item.metadata["meaning"]
            yield f"{name}=", meaning
            for value in item.metadata.get("choices") or () if name == key else ():
                yield f"{name}={value}", meaning
