"""The display of a run: a live line on a terminal, a plain one now and then elsewhere."""

import os
import sys
import time
from typing import Protocol, Self

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

_PLAIN_EVERY_S = 5.0
_LAUNCHERS = {"mpirun", "mpiexec", "mpiexec.hydra", "prterun", "prted", "srun"}


class Progress(Protocol):
    """The display of a run; used as a context."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *error: object) -> None: ...
    def step(self, done: int, loss: float, tokens_per_s: float) -> None:
        """Show a step.

        Args:
            done: number of steps that are done.
            loss: loss of the last step.
            tokens_per_s: tokens a second, over the last steps.
        """
        ...

    def say(self, text: str) -> None:
        """Print a line that stays."""
        ...


class Quiet:
    """The display that shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...
    def step(self, done: int, loss: float, tokens_per_s: float) -> None: ...
    def say(self, text: str) -> None: ...


class Live:
    """One line that moves: steps, loss, tokens a second, time left."""

    def __init__(self, steps: int, first: int = 0) -> None:
        # Under a launcher this process writes to a pipe that ends at the terminal: rich cannot see
        # that by itself.
        self._bar = Bar(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[state]}"),
            TimeRemainingColumn(compact=True),
            console=Console(force_terminal=True, width=int(os.environ.get("COLUMNS", "100"))),
            refresh_per_second=4,
        )
        self._task = self._bar.add_task("train", total=steps, completed=first, state="starting")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def step(self, done: int, loss: float, tokens_per_s: float) -> None:
        self._bar.update(
            self._task, completed=done, state=f"loss {loss:.3f}  {tokens_per_s:,.0f} tokens/s"
        )

    def say(self, text: str) -> None:
        self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)


class Plain(Quiet):
    """A line every few seconds, for logs."""

    def __init__(self, steps: int, first: int = 0) -> None:
        self._steps, self._first = steps, first
        self._began = self._last = time.monotonic()

    def step(self, done: int, loss: float, tokens_per_s: float) -> None:
        now = time.monotonic()
        if done == self._steps or now - self._last >= _PLAIN_EVERY_S:
            self._last = now
            left_s = (now - self._began) / (done - self._first) * (self._steps - done)
            self.say(
                f"step {done}/{self._steps}  loss {loss:.3f}  {tokens_per_s:,.0f} tokens/s  "
                f"{left_s:.0f} s left"
            )

    def say(self, text: str) -> None:
        print(text, flush=True)


def progress_for(kind: str, steps: int, first: int = 0) -> Progress:
    """The display of a run.

    Args:
        kind: "auto", "live", "plain" or "off"; "auto" is live on a terminal, else plain.
        steps: number of steps of the run.
        first: number of steps that are done at the start.
    """
    if kind == "auto":
        kind = "live" if _ends_at_a_terminal() else "plain"
    if kind == "off":
        return Quiet()
    return Live(steps, first) if kind == "live" else Plain(steps, first)


def _ends_at_a_terminal() -> bool:
    """The output of the launcher which forwards this process's ends at a terminal, or its own where
    there is no launcher. Open MPI gives ranks a terminal even where its own output is a file."""
    try:
        launchers = [parent for parent in psutil.Process().parents() if parent.name() in _LAUNCHERS]
        ends = [os.readlink(f"/proc/{parent.pid}/fd/1") for parent in launchers]
    except (OSError, psutil.Error):
        return False
    if not ends:
        return sys.stdout.isatty()
    return any(end.startswith(("/dev/pts/", "/dev/tty")) for end in ends)
