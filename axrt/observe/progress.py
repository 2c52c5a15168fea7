"""The display of a run: a live line on a terminal, a plain one now and then elsewhere."""

import os
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import NamedTuple, Protocol, Self

import psutil
from rich.console import Console, Group
from rich.live import Live as Moving
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar
from rich.text import Text

from axrt.ledger.ledger import readable

_PLAIN_EVERY_S = 5.0
_COLUMNS = 80  # of a terminal that does not say
_LAUNCHERS = {"mpirun", "mpiexec", "mpiexec.hydra", "prterun", "prted", "srun"}


class Shown(NamedTuple):
    """What a display shows of the run so far.

    Args:
        done: number of steps that are done.
        loss: loss of the last step.
        lr: its learning rate.
        tokens_per_s: tokens a second, over the last steps, of all ranks together.
        ranks: number of ranks.
        grad_norm: 2-norm of the gradients, of this step where steps wait for it (clipping, loss
            scales), else of the last step that has a line of metrics; None: it is not known.
        mfu: model FLOPs utilisation, as a share; None: it is not known.
        idle: share of the main rank's time in which it ran nothing, by cause.
        memory: bytes of the main rank, by tier.
        left_s: seconds until the last step; None: it is not known.
    """

    done: int
    loss: float
    lr: float = 0.0
    tokens_per_s: float = 0.0
    ranks: int = 1
    grad_norm: float | None = None
    mfu: float | None = None
    idle: Mapping[str, float] = {}
    memory: Mapping[str, int] = {}
    left_s: float | None = None

    def text(self) -> str:
        """All of it but the step and the time left, in a line."""
        norm = "" if self.grad_norm is None else f"  norm {self.grad_norm:.3g}"
        each = f" ({self.tokens_per_s / self.ranks:,.0f} a device)" if self.ranks > 1 else ""
        rate = f"  {self.tokens_per_s:,.0f} tokens/s{each}" if self.tokens_per_s else ""
        mfu = "" if self.mfu is None else f"  MFU {self.mfu:.1%}"
        causes = ", ".join(f"{cause} {share:.0%}" for cause, share in self.idle.items())
        idle = f"  idle {sum(self.idle.values()):.0%} ({causes})" if self.idle else ""
        memory = "".join(f"  {tier} {readable(size)}" for tier, size in self.memory.items())
        return f"loss {self.loss:.3f}  lr {self.lr:.2g}{norm}{rate}{mfu}{idle}{memory}"

    @property
    def left(self) -> str:
        """The time left, as a person reads it."""
        return "-:--:--" if self.left_s is None else str(timedelta(seconds=round(self.left_s)))


class Progress(Protocol):
    """The display of a run; used as a context."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *error: object) -> None: ...
    def step(self, shown: Shown) -> None:
        """Show a step."""
        ...

    def say(self, text: str) -> None:
        """Print a line that stays."""
        ...


class Quiet:
    """The display that shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...
    def step(self, shown: Shown) -> None: ...
    def say(self, text: str) -> None: ...


class Live:
    """Two lines that move: steps and time left; and the figures of the run.

    Args:
        steps: number of steps of the run.
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


class Plain(Quiet):
    """A line every few seconds, for logs."""

    def __init__(self, steps: int) -> None:
        self._steps, self._last = steps, time.monotonic()

    def step(self, shown: Shown) -> None:
        now = time.monotonic()
        if shown.done == self._steps or now - self._last >= _PLAIN_EVERY_S:
            self._last = now
            self.say(f"step {shown.done}/{self._steps}  {shown.text()}  {shown.left} left")

    def say(self, text: str) -> None:
        print(text, flush=True)


def progress_for(kind: str, steps: int, first: int = 0) -> Progress:
    """The display of a run.

    Args:
        kind: "auto", "live", "plain" or "off"; "auto" is live on a terminal, else plain.
        steps: number of steps of the run.
        first: number of steps that are done at the start.
    """
    if kind == "off":
        return Quiet()
    terminal = _terminal()
    if kind == "auto":
        kind = "plain" if terminal is None else "live"
    return Live(steps, first, terminal or "") if kind == "live" else Plain(steps)


def _terminal() -> str | None:
    """The terminal at which the output of the launcher ends which forwards this process's, or its
    own where there is no launcher; None where it ends elsewhere. Open MPI gives ranks a terminal
    even where its own output is a file."""
    try:
        launchers = [parent for parent in psutil.Process().parents() if parent.name() in _LAUNCHERS]
        ends = [os.readlink(f"/proc/{parent.pid}/fd/1") for parent in launchers]
        if not ends:
            return os.ttyname(1) if sys.stdout.isatty() else None
    except (OSError, psutil.Error):
        return None
    return next((end for end in ends if end.startswith(("/dev/pts/", "/dev/tty"))), None)


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
