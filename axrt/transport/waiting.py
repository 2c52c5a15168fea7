"""How a rank waits without burning a core: each pause is a two-hundredth of the time it has waited already.

A blocked MPI receive keeps a whole core busy under every library, and spinning on cores that are shared costs
the others milliseconds. So between two looks the rank sleeps, in proportion: what a message waits for its
receiver to look is at most a two-hundredth of what the receiver has waited for the message. The pauses are bounded
from below, where a sleep costs more than it saves, and from above, so that a long silence does not dull the ear.
"""

import ctypes
import sys
import time

_PR_SET_TIMERSLACK = 29
_SHARE = 0.005


class Patience:
    """The pauses of one waiting rank.

    Args:
        shortest_s: below this a sleep is all overhead (about 25 microseconds).
        longest_s: at this, looking costs some 3 % of a core.
    """

    def __init__(self, shortest_s: float = 20e-6, longest_s: float = 800e-6) -> None:
        self._shortest_s, self._longest_s = shortest_s, longest_s
        self._since = time.perf_counter()
        self._spins = 0

    def reset(self) -> None:
        """Something has come, or there was something to do."""
        self._since = time.perf_counter()
        self._spins = 0

    def pause(self) -> None:
        """Nothing has come; the first few times return at once."""
        self._spins += 1
        if self._spins > 3:
            waited_s = time.perf_counter() - self._since
            time.sleep(min(max(self._shortest_s, _SHARE * waited_s), self._longest_s))


def sharpen_sleep() -> None:
    """Let this thread's sleeps end when they should: Linux adds up to 50 microseconds unless told otherwise."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)
