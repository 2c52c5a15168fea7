"""Loans of a bucket's weights and state: somebody reads them until a moment, such as a checkpoint
that is copied beside the step."""

from collections.abc import Callable

from axrt.device.queues import Moment, go_after


class Loans:
    """Who reads a bucket at the moment. Nobody else writes to it before they have ended."""

    def __init__(self) -> None:
        self._open: dict[object, tuple[Moment, Callable[[], None]]] = {}

    def lend(self, to: object, until: Moment, returned: Callable[[], None]) -> None:
        """Let somebody read weights and state until a moment.

        Args:
            returned: function that is called when that has passed, before anything is written.
        """
        self._open[to] = (until, returned)

    def end(self, to: object = None) -> None:
        """Let what follows come after the end of a loan; on an accelerator the host waits for
        nothing.

        Args:
            to: who reads; None: everybody who does.
        """
        for reader in [to] if to else list(self._open):
            if reader in self._open:
                until, returned = self._open.pop(reader)
                go_after(until)
                returned()
