"""How a rank waits without burning a core: the longer it has waited, the longer it sleeps before it
looks again.

A blocked MPI receive keeps a whole core busy under every library, and spinning on cores that are
shared costs the others milliseconds. So between two looks the rank sleeps, in proportion to what it
has waited already: a tenth of it, up to a pause that leaves four fifths of the core to others;
after that, where a message that comes a little later does no harm, a two-hundredth. The pauses are
bounded from below, where a sleep costs more than it saves, and from above, so that a long silence
does not dull the ear.
"""

import ctypes
import sys
import time

_PR_SET_TIMERSLACK = 29
_SHARE, _SHARE_OF_LONG = 0.1, 0.005


class Patience:
    """The pauses of one waiting rank.

    Args:
        shortest_s: below this a sleep is all overhead (about 25 microseconds).
        brief_s: the pause of all waits that are not long.
        longest_s: at this, looking costs some 3 % of a core.
    """

    def __init__(
        self, shortest_s: float = 20e-6, brief_s: float = 120e-6, longest_s: float = 800e-6
    ) -> None:
        self._shortest_s, self._brief_s, self._longest_s = shortest_s, brief_s, longest_s
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
            brief_s = min(max(self._shortest_s, _SHARE * waited_s), self._brief_s)
            time.sleep(min(max(brief_s, _SHARE_OF_LONG * waited_s), self._longest_s))


def sharpen_sleep() -> None:
    """Let this thread's sleeps end when they should: Linux adds up to 50 microseconds unless told
    otherwise."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)
