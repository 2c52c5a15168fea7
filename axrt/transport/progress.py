"""Messages that move on while the rank computes (asynchronous progress).

A large message is agreed on first, and moves only inside MPI calls; a rank that computes makes
none. So while one is under way a thread looks after it now and then. Two kinds do not need it:
small ones are there before they are asked for, and some ranks take large ones alone
(`single_copy.py`).
"""

import threading
import time
from collections.abc import Callable

from .waiting import sharpen_sleep

# Looking costs a rank that computes about three hundredths of its core then, and a message of a
# megabyte takes longer.
_PAUSE_S = 1e-3


class Progress:
    """A thread that looks as long as it is wanted; it starts when it is wanted first.

    Args:
        look: function that lets messages move on, and says by `wanted` whether there is still
            anything to look after. It must not fail.
    """

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look
        self._wanted, self._stopped = threading.Event(), False
        self._thread: threading.Thread | None = None

    def wanted(self, wanted: bool) -> None:
        """Say whether there is anything to look after. Calls must not overlap."""
        if wanted == self._wanted.is_set():
            return
        if not wanted:
            self._wanted.clear()
            return
        self._wanted.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="axrt progress", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread; it does not look any more when this returns."""
        self._stopped = True
        self._wanted.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        sharpen_sleep()
        while not self._stopped:  # first: a look may take back the wish with which `stop` wakes it
            self._wanted.wait()
            time.sleep(_PAUSE_S)
            if not self._stopped:
                self._look()
