"""Every message that docs/troubleshooting.md quotes is one of the code's."""

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

from axrt.scheduler.plural import plural

from .pages import PAGES, ROOT

ANY = "…"  # for names and numbers, in the page and here
OTHERS = "## Words of others"


def quoted() -> list[str]:
    """The first cells of the rows of messages."""
    page = (PAGES / "troubleshooting.md").read_text().partition(OTHERS)[0]
    tables = page.partition("## Start of a job")[2]
    return re.findall(r"^\| `([^`]+)` \|", tables, re.MULTILINE)


@cache
def messages() -> str:
    """All texts of the code, one a line; what is filled in is `ANY`."""
    texts = {
        " ".join(text.split())
        for room in ("axrt", "scheduler", "offload")
        for file in (ROOT / room).rglob("*.py")  # which follows no links
        for node in ast.walk(ast.parse(file.read_text()))
        if (text := "".join(parts(node)))
    }
    return "\n".join(sorted(texts))


def parts(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr(values=values):
            for value in values:
                yield from filled(value)


def filled(value: ast.expr) -> Iterator[str]:
    """What stands for a part of a text; a number with its noun is said in the plural."""
    match value:
        case ast.Constant():
            yield from parts(value)
        case ast.FormattedValue(
            value=ast.Call(func=ast.Name(id="plural"), args=[_, ast.Constant(value=str(noun))])
        ):
            yield f"{ANY} {plural(2, noun).partition(' ')[2]}"
        case _:
            yield ANY


@pytest.mark.parametrize("message", quoted())
def test_a_quoted_message_is_in_the_code(message: str) -> None:
    pieces = (re.escape(piece.strip()) for piece in message.strip(f"{ANY} ").split(ANY))
    assert re.search(".*?".join(pieces), messages()), message


def test_there_are_many_of_them() -> None:
    assert len(quoted()) > 40
