"""Ending a run early and in order: a signal is noted, and acted on between two steps."""

import signal
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGUSR1)
_TWICE_S = 1.0  # a terminal and the launcher may both pass one Ctrl-C on


class Interrupt:
    """A context in which Ctrl-C (or SIGUSR1) asks for an end; a second Ctrl-C ends at once, as
    ever. So does the first one before there is a step to end with, while layers compile for
    example.

    Every rank catches signals, and the main one acts on them, also on those that another rank has
    passed on: its batches end with a step, which every rank is told as it is of any end of data.

    Attributes:
        asked: True once an end has been asked for.
    """

    def __init__(self) -> None:
        self.asked = False
        self._in_order = False
        self._since = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._hear) for number in _SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            # A late SIGUSR1 would end a run that is done, which has no use for it.
            if (number, handler) != (signal.SIGUSR1, signal.SIG_DFL):
                signal.signal(number, handler)

    def end_in_order(self) -> None:
        """From now on there is a step to end with, and something to save."""
        self._in_order = True

    def ask(self) -> None:
        """Ask for an end, as a signal does."""
        if not self.asked:
            self.asked, self._since = True, time.monotonic()

    def until(self, batches: Iterator[Any], microbatches: int) -> Iterator[Any]:
        """The batches until an end is asked for, in whole steps."""
        while not self.asked:
            for _ in range(microbatches):
                yield next(batches)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        is_again = self.asked and time.monotonic() - self._since > _TWICE_S
        if number == signal.SIGINT and (is_again or not self._in_order):
            raise KeyboardInterrupt
        self.ask()
