"""Single keys on the command line, `section.key=value`."""

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any, TypeVar, get_type_hints

import click
from click.shell_completion import BashComplete, CompletionItem

_Command = TypeVar("_Command", bound=Callable[..., Any])


def with_overrides(command: _Command) -> _Command:
    """Give a command such arguments, which a shell completes."""
    metavar = "[section.key=value]..."
    return click.argument("overrides", nargs=-1, metavar=metavar, shell_complete=_fitting)(command)


def _fitting(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    before, cut = _before(context, incomplete)
    return [
        CompletionItem(text[len(before) :], help=meaning)
        for text, meaning in _texts((before + cut).partition("=")[0])
        if text.startswith(before + cut)
    ]


def _before(context: click.Context, incomplete: str) -> tuple[str, str]:
    """What of a word stands before what a shell completes, and what it has of that so far. Bash
    cuts words at "=": it completes what follows alone."""
    said = list(context.params.get("overrides") or ())
    if len(said) > 1 and said[-1] == "=":
        return f"{said[-2]}=", incomplete
    if said and "=" not in said[-1] and not incomplete:  # click takes a "=" at the end away
        return f"{said[-1]}=", ""
    return "", incomplete


def _texts(key: str) -> Iterator[tuple[str, str]]:
    """Every key, and, for one that is whole, each value of those that it chooses among."""
    from axrt.config import Config

    for section, of in get_type_hints(Config).items():
        for item in fields(of):
            name, meaning = f"{section}.{item.name}", item.metadata["meaning"]
            if name != key:
                yield f"{name}=", meaning
            for value in item.metadata.get("choices") or () if name == key else ():
                yield f"{name}={value}", meaning


class Bash(BashComplete):
    """Completion in bash, with no blank behind the "=" of a key."""

    source_template = BashComplete.source_template.replace(
        "    return 0\n",
        "    [[ ${COMPREPLY[0]-} != *= ]] || compopt -o nospace\n    return 0\n",
    )
