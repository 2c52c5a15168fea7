"""A witness of a rank's end: a small process that notices when the rank dies without a word, and
when. Launchers end all ranks soon after one has died, so the first death is the cause."""

# `axrt launch` keeps a record of each start, and `decision.py` decides from these alone. Which host
# has lost a rank says the launcher. Where it does not, the first death counts, since launchers end
# all ranks soon after one. A rank cannot tell of its own death, and the others are ended as well.
# So a copy of it, made before MPI starts, is told by the kernel and notes the time.

import contextlib
import ctypes
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from axrt.scheduler.regular_file import read_text

_TELL_OF_PARENTS_DEATH, _SET_NAME = 1, 15  # PR_SET_PDEATHSIG, PR_SET_NAME
_MOST_FILES = 4096
FOLDER = "AXRT_WITNESSES"  # the environment's variable that names a directory which hosts share


@contextlib.contextmanager
def witnessed(rank: int) -> Iterator[None]:
    """Context of a rank's life, where the environment names a directory for witnesses. It begins
    before MPI does: then a process may still be copied.

    A rank that leaves the context, in whatever way, has ended with a word.
    """
    folder = os.environ.get(FOLDER)
    if not folder or sys.platform != "linux":
        yield
        return
    hears, says = os.pipe()
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # threads that Python warns of are not needed there
        child = os.fork()
    if child == 0:
        _watch(parent, hears, Path(folder, f"rank-{rank}"))
    os.close(hears)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.write(says, b"ended")


def _watch(parent: int, hears: int, file: Path) -> None:
    """Wait for the end of the rank, and write its time if there was no word."""
    try:
        os.setsid()  # not in the group that the launcher ends
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):  # the launcher waits until everybody has closed these
            os.dup2(nothing, descriptor)
        os.closerange(3, hears)
        os.closerange(hears + 1, _MOST_FILES)  # the launcher's own, and the end that says a word
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
        # No end of a pipe is waited for: children of the rank may hold it for longer.
        library = ctypes.CDLL(None)
        library.prctl(_SET_NAME, b"axrt witness")  # as ps -o comm and top show it
        library.prctl(_TELL_OF_PARENTS_DEATH, int(signal.SIGUSR2))
        if os.getppid() == parent:
            signal.sigwait([signal.SIGUSR2])
        at = time.time()
        os.set_blocking(hears, False)
        try:
            word = os.read(hears, 1)
        except BlockingIOError:  # a child of the rank holds the other end
            word = b""
        if not word:
            file.write_text(f"{at:.6f} {os.uname().nodename}\n")
    finally:
        os._exit(0)


def first_lost(folder: Path) -> tuple[int, str] | None:
    """The rank that has died first without a word, and the name of its host; None where none
    has."""
    found = []
    for file in folder.glob("rank-*"):
        with contextlib.suppress(OSError, ValueError):
            at, host = read_text(file).split()
            found.append((float(at), int(file.name.partition("-")[2]), host))
    return min(found)[1:] if found else None
