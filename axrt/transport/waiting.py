"""How a rank waits without burning a core: the longer it has waited, the longer it sleeps before it
looks again."""

# A blocked MPI receive keeps a whole core busy under every library, and spinning on cores that are
# shared costs the others milliseconds. So between two looks the rank sleeps in proportion to the
# time that it has waited already. It sleeps a tenth of it, up to a pause that leaves four fifths of
# the core to others. In long waits, where a message that comes a little later does no harm, it
# sleeps a two-hundredth. The pauses are bounded from below, where a sleep costs more than it saves,
# and from above, so that a message after a long silence is still heard soon.

import ctypes
import sys
import time
from math import inf

_PR_SET_TIMERSLACK = 29
_SHARE, _SHARE_OF_LONG = 0.1, 0.005


# Sleeps grow with the wait. A fixed pause burns a core or reacts late.
class Patience:
    """The pauses of one waiting rank.

    Args:
        shortest_s: shortest pause, in seconds; a shorter sleep is all overhead, about 25
            microseconds.
        brief_s: longest pause of waits that are not long, in seconds.
        longest_s: longest pause of all, in seconds; at this one, looking costs some 3 % of a core.
    Attributes:
        spins: number of pauses since something came last.
    """

    def __init__(
        self, shortest_s: float = 20e-6, brief_s: float = 120e-6, longest_s: float = 800e-6
    ) -> None:
        self._shortest_s, self._brief_s, self._longest_s = shortest_s, brief_s, longest_s
        self._since = 0.0
        self.spins = 0

    def reset(self) -> None:
        """Begin anew: something has come, or there was something to do."""
        self.spins = 0

    def pause(self, until_s: float = inf) -> None:
        """Sleep, since nothing has come; the first three calls return at once.

        Args:
            until_s: time of `time.perf_counter` at which the wait ends; the sleep ends by then.
        """
        if self.spins == 0:
            self._since = time.perf_counter()
        self.spins += 1
        if self.spins > 3:
            now_s = time.perf_counter()
            waited_s = now_s - self._since
            brief_s = min(max(self._shortest_s, _SHARE * waited_s), self._brief_s)
            pause_s = min(max(brief_s, _SHARE_OF_LONG * waited_s), self._longest_s)
            time.sleep(max(0.0, min(pause_s, until_s - now_s)))


def sharpen_sleep() -> None:
    """Let this thread's sleeps end when they should: Linux adds up to 50 microseconds unless told
    otherwise."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)
