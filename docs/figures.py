"""What benchmarks have written, laid into the pages.

`scripts/figures NAME COMMAND...` runs a command and keeps what it prints in docs/figures/NAME.md,
behind a line that says which command it was, when, and on what. A page has a place for it:

    <!-- figures/NAME.md -->
    <!-- end of figures -->

Between these lines stand the table of that file, or all of its text where it has no table, and
where that came from. A test holds them equal. A second name, figures/NAME.md:2, takes the second
table of the file.
"""

import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
_WIDE = 100
_PLACE = re.compile(
    r"(<!-- figures/([\w-]+\.md)(?::(\d+))? -->\n).*?(<!-- end of figures -->)", re.DOTALL
)


def tables(text: str) -> Iterator[str]:
    """The tables of a text, in their order; without any, the text as a block."""
    found = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    yield from found or [f"```text\n{text.strip()}\n```\n"]


def source(comment: str) -> str:
    """The line that says where figures are from: a command, and a day, a commit and a machine."""
    command, _, made = comment.removeprefix("<!-- ").removesuffix(" -->").rpartition(" - ")
    text = f"`{command}`: {made}."
    return textwrap.fill(text, _WIDE, break_long_words=False, break_on_hyphens=False)


def laid_in(page: str, folder: Path) -> str:
    """A page with the tables of its files.

    Args:
        page: text of the page.
        folder: where the files are.
    Raises:
        ValueError: a file is not there, or has no such table.
    """

    def place(found: re.Match[str]) -> str:
        file, number = folder / found[2], int(found[3] or 1)
        try:
            text = file.read_text(encoding="utf-8")
            first, rest = text.split("\n", 1)
            table = list(tables(rest))[number - 1]
        except (OSError, ValueError, IndexError):
            raise ValueError(
                f"{file} has no table {number}; expected what scripts/figures has written"
            ) from None
        return f"{found[1]}\n{table}\n{source(first)}\n\n{found[4]}"

    return _PLACE.sub(place, page)


def names(page: str) -> set[str]:
    """The files that a page has tables of."""
    return {found[2] for found in _PLACE.finditer(page)}


if __name__ == "__main__":
    for path in sorted(HERE.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        try:
            path.write_text(laid_in(text, HERE / "figures"), encoding="utf-8")
        except ValueError as error:
            sys.exit(f"{path.name}: {error}")
