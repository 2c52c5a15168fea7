"""The display of a run on a terminal: two lines that move."""

import os
from typing import Self

from rich.console import Console, Group
from rich.live import Live as Moving
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar
from rich.text import Text

from .progress import Shown

_COLUMNS = 80  # of a terminal that does not say


class Live:
    """Two lines that move: steps and time left; and the figures of the run.

    Args:
        first: number of steps that are done at the start.
        terminal: file of the terminal at which it is shown; "": it is not known.
    """

    def __init__(self, steps: int, first: int = 0, terminal: str = "") -> None:
        # Under a launcher this process writes to a pipe that ends at the terminal: rich cannot see
        # that by itself, nor how wide it is.
        self._terminal = terminal
        console = Console(force_terminal=True, width=_columns(terminal))
        columns = (
            MofNCompleteColumn(),
            BarColumn(bar_width=40),
            TextColumn("{task.fields[left]} left"),
        )
        self._bar = Bar(TextColumn("step"), *columns, console=console)
        self._task = self._bar.add_task("train", total=steps, completed=first, left="-:--:--")
        self._figures = Text("starting")
        self._moving = Moving(
            Group(self._bar, self._figures), console=console, refresh_per_second=4
        )

    def __enter__(self) -> Self:
        self._moving.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._moving.stop()

    def step(self, shown: Shown) -> None:
        self._moving.console.width = _columns(self._terminal)  # a window may change
        self._bar.update(self._task, completed=shown.done, left=shown.left)
        self._figures.plain = shown.text()

    def say(self, text: str) -> None:
        self._moving.console.print(text, highlight=False, markup=False, soft_wrap=True)


def _columns(terminal: str) -> int:
    """The width of a terminal: what COLUMNS says, or what it says itself."""
    if said := os.environ.get("COLUMNS", ""):
        return int(said) if said.isdecimal() and int(said) else _COLUMNS
    try:
        place = os.open(terminal, os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return _COLUMNS
    try:
        return os.get_terminal_size(place).columns or _COLUMNS
    except OSError:
        return _COLUMNS
    finally:
        os.close(place)
