"""The pages of docs/ and of the README, cut into their blocks of code."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs"
_BLOCK = re.compile(r"(?P<before>[^\n]*)\n\n?```(?P<language>\w+)\n(?P<text>.*?)^```", re.S | re.M)


@dataclass(frozen=True)
class Block:
    """A block of code.

    Args:
        language: what stands behind its first fence.
        text: what is between the fences.
        before: the line above it, which may be a comment.
        page: name of the page, without its ending.
    """

    language: str
    text: str
    before: str
    page: str

    def commands(self) -> list[str]:
        """The commands of a console, each in one line; what they print is left out."""
        joined = self.text.replace("\\\n", "")
        return [line[2:].rstrip() for line in joined.splitlines() if line.startswith("$ ")]


def blocks(page: str) -> Iterator[Block]:
    """The blocks of a page of docs/, or of "README"."""
    for found in _BLOCK.finditer(text_of(page)):
        yield Block(found["language"], found["text"], found["before"].strip(), page)


def codes(page: str) -> Iterator[str]:
    """What stands between backticks in the prose of a page."""
    for token in MarkdownIt().enable("table").parse(text_of(page)):
        yield from (of.content for of in token.children or () if of.type == "code_inline")


def text_of(page: str) -> str:
    """The Markdown of a page of docs/, or of "README"."""
    return (ROOT / "README.md" if page == "README" else PAGES / f"{page}.md").read_text()
