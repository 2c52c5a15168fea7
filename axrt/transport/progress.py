"""Messages that move on while the rank computes (asynchronous progress)."""

# A large message is agreed on first, and moves only inside MPI calls; a rank that computes makes
# none. So a thread looks after what MPI has not copied at once, and after what comes in. What peers
# take by themselves (`single_copy.py`) gets a look now and then, in case MPI's own queues are full.
#
# While messages to others go out, or large ones come in, the thread looks once a millisecond: it
# takes envelopes in, posts receives and keeps what has arrived for the next poll. A look costs some
# 30 us of the rank's core. What goes to peers with single copy has a look every 20 ms. One lock
# guards what the thread shares with the loop, and the loop comes first. It decides nothing and
# starts nothing. There is no thread where tasks run on a device, or where MPI allows calls from one
# only. What fails in it is raised where the rank polls next, and it ends before MPI does.

import threading
import time
from collections.abc import Callable

from .waiting import sharpen_sleep

# Looking costs a rank that computes about three hundredths of its core then, and a message of a
# megabyte takes longer.
_PAUSE_S = 1e-3
_SELDOM_S = 20e-3


# A thread looks after large messages. With looks between segments alone next to nothing of a
# reduction was hidden on a network with two directions.
class Progress:
    """A thread that looks while it is wanted; it starts when it is wanted first.

    Args:
        look: function that lets messages move on, and says by `wanted` whether there is still
            anything to look after. It must not fail.
    """

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look
        self._often, self._seldom, self._stopped = threading.Event(), False, False
        self._is_often = False
        self._thread: threading.Thread | None = None

    @property
    def looks(self) -> bool:
        """There is something to look after, by what `wanted` was told last."""
        return self._is_often or self._seldom

    def wanted(self, often: bool, seldom: bool = False) -> None:
        """Say whether there is anything to look after. Calls must not overlap.

        Args:
            often: something needs a look every millisecond.
            seldom: something needs a look every 20 ms.
        """
        self._seldom = seldom
        if often != self._is_often:
            self._is_often = often
            if often:
                self._often.set()
            else:
                self._often.clear()
        if (often or seldom) and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="axrt progress", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread; it does not look any more when this returns."""
        self._stopped = True
        self._often.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        sharpen_sleep()
        while not self._stopped:  # first: a look may take back the wish with which `stop` wakes it
            # It is not woken for what needs it seldom: waking costs as much as a look.
            often = self._often.wait(_SELDOM_S)
            if often:
                time.sleep(_PAUSE_S)
            if (often or self._seldom) and not self._stopped:
                self._look()
