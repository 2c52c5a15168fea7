"""Tables that benchmarks have written, laid into the pages.

`scripts/figures NAME COMMAND...` runs a command and keeps what it prints in docs/figures/NAME.md,
behind a line that says which command it was, when, and on what. A page has a place for the table:

    <!-- figures/NAME.md -->
    <!-- end of figures -->

Between these lines stands the table of that file, and a test holds them equal. A second name,
figures/NAME.md:2, takes the second table of the file.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
_PLACE = re.compile(
    r"(<!-- figures/([\w-]+\.md)(?::(\d+))? -->\n).*?(<!-- end of figures -->)", re.DOTALL
)


def tables(text: str) -> Iterator[str]:
    """The tables of a text, in their order."""
    for found in re.finditer(r"(?:^\|.*\n)+", text, re.MULTILINE):
        yield found[0]


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
            of = list(tables(file.read_text(encoding="utf-8")))
            return f"{found[1]}\n{of[number - 1]}\n{found[4]}"
        except (OSError, IndexError):
            raise ValueError(
                f"{file} has no table {number}; expected what scripts/figures has written"
            ) from None

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
