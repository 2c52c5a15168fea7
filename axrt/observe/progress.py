"""The display of a run: a live line on a terminal, a plain one now and then elsewhere."""

import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import NamedTuple, Protocol, Self

import psutil

from axrt.ledger.ledger import Unit

_LONGEST_S = 1e10  # that is told: three hundred years
_LAUNCHERS = {"mpirun", "mpiexec", "mpiexec.hydra", "prterun", "prted", "srun"}


class Shown(NamedTuple):
    """What a display shows of the run so far."""

    done: int  # number of steps that are done
    loss: float  # loss of the last step
    lr: float = 0.0  # its learning rate
    tokens_per_s: float = 0.0  # tokens a second, over the last steps, of all ranks together
    ranks: int = 1  # number of ranks
    # 2-norm of the gradients, of this step where steps wait for it (clipping, loss scales),
    # else of the last step that has a line of metrics; None: it is not known
    grad_norm: float | None = None
    mfu: float | None = None  # model FLOPs utilisation, as a share; None: it is not known
    # share of the main rank's time in which it ran nothing, by cause
    idle: Mapping[str, float] = {}
    memory: Mapping[str, int] = {}  # bytes of the main rank, by tier
    left_s: float | None = None  # seconds until the last step; None: it is not known

    def text(self) -> str:
        """All of it but the step and the time left, in a line."""
        norm = "" if self.grad_norm is None else f"  norm {self.grad_norm:.3g}"
        each = f" ({self.tokens_per_s / self.ranks:,.0f} a device)" if self.ranks > 1 else ""
        rate = f"  {self.tokens_per_s:,.0f} tokens/s{each}" if self.tokens_per_s else ""
        mfu = "" if self.mfu is None else f"  MFU {self.mfu:.1%}"
        causes = ", ".join(f"{cause} {share:.0%}" for cause, share in self.idle.items())
        idle = f"  idle {sum(self.idle.values()):.0%} ({causes})" if self.idle else ""
        unit = Unit.of(max(self.memory.values(), default=0))
        memory = "".join(f"  {tier} {unit.text(size)}" for tier, size in self.memory.items())
        return f"loss {self.loss:.3f}  lr {self.lr:.2g}{norm}{rate}{mfu}{idle}{memory}"

    @property
    def left(self) -> str:
        """The time left, as a person reads it."""
        if self.left_s is None or self.left_s > _LONGEST_S:
            return "-:--:--"
        return str(timedelta(seconds=round(self.left_s)))


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


class Plain(Quiet):
    """A line every so many steps, for logs."""

    def __init__(self, steps: int, every: int) -> None:
        self._steps, self._every = steps, every

    def step(self, shown: Shown) -> None:
        if shown.done == self._steps or shown.done % self._every == 0:
            self.say(f"step {shown.done}/{self._steps}  {shown.text()}  {shown.left} left")

    def say(self, text: str) -> None:
        print(text, flush=True)


def progress_for(kind: str, steps: int, first: int = 0, every: int = 1) -> Progress:
    """The display of a run.

    Args:
        kind: "auto", "live", "plain" or "off"; "auto" is live on a terminal, else plain.
        first: number of steps that are done at the start.
    """
    if kind == "off":
        return Quiet()
    terminal = _terminal()
    if kind == "auto":
        kind = "plain" if terminal is None else "live"
    if kind == "plain":
        return Plain(steps, every)
    from .live import Live  # imports rich, which other ranks and logs have no use for

    return Live(steps, first, terminal or "")


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
