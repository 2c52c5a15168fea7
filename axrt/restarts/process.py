"""A job that runs: the process of its launcher, what that says, and the signals that it gets."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from axrt.exit_codes import FILE
from axrt.scheduler.regular_file import read_text

from .witness import FOLDER

_CODE = "code"
_LOOK_S = 0.1
_LEAVES_S = 60.0  # for ranks to follow a launcher that has ended; a last save may be under way


class JobProcess:
    """The process of a launcher. Its errors are shown as they come.

    Args:
        folder: empty directory, which the hosts of the job share, for what its ranks leave.
        hear: function that is called with each line of errors.
    """

    def __init__(self, words: Sequence[str], folder: Path, hear: Callable[[str], None]) -> None:
        variables = {FILE: str(folder / _CODE), FOLDER: str(folder)}
        self._folder = folder
        self._mark = os.fsencode(f"{FOLDER}={folder}")  # of processes of this job
        self._hear = hear
        self._process = subprocess.Popen(
            words,
            env=os.environ | variables,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # a Ctrl-C comes to the parent alone, which passes it on
        )
        self._shows = threading.Thread(target=self._show, daemon=True)
        self._shows.start()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the launcher, if it is still there."""
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    @property
    def said(self) -> int | None:
        """The code that the first rank to end has left; None where none has."""
        try:
            return int(read_text(self._folder / _CODE))
        except (OSError, ValueError):
            return None

    def wait(self, look: Callable[[], None]) -> int:
        """Wait until the job has ended, and no process of it is left on this machine.

        Args:
            look: function that is called every now and then.
        Returns:
            The exit code of the launcher.
        """
        while (code := self._process.poll()) is None:
            time.sleep(_LOOK_S)
            look()
        self._leave()
        self._shows.join(_LEAVES_S)
        return code

    def _leave(self) -> None:
        """Wait for what the launcher has left over, and then end it."""
        until = time.monotonic() + _LEAVES_S
        while (left := list(self._left())) and time.monotonic() < until:
            time.sleep(_LOOK_S)
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def _left(self) -> Iterator[int]:
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if self._mark in folder.joinpath("environ").read_bytes().split(b"\0"):
                    yield int(folder.name)

    def _show(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as said:
            for line in said:
                with suppress(OSError, ValueError):  # nobody may look any more; the job goes on
                    sys.stderr.write(line)
                    sys.stderr.flush()
                self._hear(line)
