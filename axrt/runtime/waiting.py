"""Notes when a rank waits and when it goes on, and tells whoever watches it."""

import time

from axrt.observe.activity import Activity
from axrt.observe.observer import Audience, Wait

from .peers import Peers


# Asked for by an attribute first, `activity.waits`: a call for each task would be seen.
class Waiting:
    """Whether this rank waits.

    Args:
        activity: what it does, which a thread may read.
    """

    def __init__(self, audience: Audience, activity: Activity, peers: Peers) -> None:
        self._audience, self.activity, self._peers = audience, activity, peers

    def begin_call(self) -> None:
        """A call of the engine begins."""
        self.activity.waits, self.activity.since_s = False, time.perf_counter()
        for tell in self._audience.entered:
            tell()

    def tell(self, wait: Wait) -> None:
        """Nothing moves or starts here."""
        self.activity.waits = True
        for tell in self._audience.waiting:
            tell(wait)

    def go_on(self) -> None:
        """Note that this rank has waited, and goes on."""
        self.activity.waits = False
        self._peers.moved()
        for tell in self._audience.resumed:
            tell()
