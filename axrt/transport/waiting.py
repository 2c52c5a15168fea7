"""How a rank waits without burning a core: look often at first, then ever more rarely.

A blocked MPI receive keeps a whole core busy under every library, and spinning on cores that are shared
costs the others milliseconds. So between two looks the rank sleeps, at first so briefly that a message is
seen within 0.2 ms, and after a while without any longer, up to a millisecond.
"""

import ctypes
import sys
import time

_PR_SET_TIMERSLACK = 29


class Patience:
    """The pauses of one waiting rank.

    Args:
        shortest_s: the pause while messages flow.
        longest_s: the pause after a long silence.
        alert_s: for so long after the last message the pauses stay short.
    """

    def __init__(self, shortest_s: float = 100e-6, longest_s: float = 1e-3, alert_s: float = 1.0) -> None:
        self._shortest_s, self._longest_s, self._alert_s = shortest_s, longest_s, alert_s
        self._since = time.perf_counter()
        self._spins = 0

    def reset(self) -> None:
        """Something has come."""
        self._since = time.perf_counter()
        self._spins = 0

    def pause(self) -> None:
        """Nothing has come; the first few times return at once."""
        self._spins += 1
        if self._spins > 3:
            silent_s = time.perf_counter() - self._since
            time.sleep(self._shortest_s if silent_s < self._alert_s else self._longest_s)


def sharpen_sleep() -> None:
    """Let this thread's sleeps end when they should: Linux adds up to 50 microseconds unless told otherwise."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)
