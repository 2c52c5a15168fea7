"""Tells a person what a rank waits for, when it has waited long."""

import sys
import time
from collections.abc import Callable

from .activity import Activity
from .observer import Observer, Wait


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class WaitDiagnosis(Observer):
    """After a minute without any event, and again after two, four and so on, it names what is
    awaited and who owes it.

    Args:
        rank: number of the rank, and which member it is where several hold a stage, in words.
        patience_s: seconds of waiting until the first text; each later text comes after twice as
            long.
        say: function that takes the text.
        now: clock, in seconds.
    """

    def __init__(
        self,
        rank: str,
        activity: Activity,
        patience_s: float = 60.0,
        say: Callable[[str], None] = _to_stderr,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._rank, self._activity, self._say, self._now = rank, activity, say, now
        self._patience_s = patience_s
        self._since: float | None = (
            None  # of the first word since anything happened that this rank waits
        )
        self._next_s = patience_s

    def entered(self) -> None:
        self._since = None

    def resumed(self) -> None:
        self._since = None

    def waiting(self, wait: Wait) -> None:
        if self._since is None:
            self._since, self._next_s = self._now(), self._patience_s
        waited_s = self._now() - self._since
        if waited_s < self._next_s:
            return
        self._next_s *= 2
        last = self._activity.heard
        heard = "nothing yet" if last is None else f"{last[1]} from rank {last[0]}"
        self._say(
            f"axrt: rank {self._rank} has waited {waited_s:.0f} s: "
            f"{wait.what() or 'nothing that it knows of'}; last heard: {heard}. "
            "(F2.7: forward of stage 2, microbatch 7; B: backward; step: the optimizer's; room: "
            "its cap, freed by a backward)"
        )
