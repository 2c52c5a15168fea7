"""One run writes to a directory: a second one is refused by name of host and process.

The lock is the system's own (`flock`), held as long as the process lives: that of a dead process on the same host is simply
free. What the file says is for people, and for other hosts, where a file system may not pass locks on.
"""

import fcntl
import json
import os
import socket
import weakref
from contextlib import suppress
from pathlib import Path

import psutil

from axrt.errors import ConfigError

_NAME = ".lock"
_JOB = "SLURM_JOB_ID"


class DirectoryLock:
    """Held from when it is made until `release`.

    Args:
        directory: that this process is going to write to.
    Raises:
        ConfigError: another process writes to it.
        OSError: nothing can be written there.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / _NAME
        # Not for writing: that would keep an administrator from making the disk read-only.
        self._file = os.open(self._path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._close = weakref.finalize(self, os.close, self._file)
        try:
            self._take(directory)
        except BaseException:
            self._close()
            raise

    def release(self) -> None:
        """Let others write there."""
        with suppress(OSError):
            os.truncate(self._path, 0)
        self._close()

    def _take(self, directory: Path) -> None:
        passes_on = True  # the file system keeps locks at all
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if self._said() == _myself():  # another engine of this process, which cannot write at the same time
                return
            raise self._refusal(directory, self._said()) from None
        except OSError:
            passes_on = False
        said = self._said()
        if said and not _is_mine(said) and _may_live(said, passes_on):
            raise self._refusal(directory, said)
        self._path.write_text(json.dumps(_myself()))

    def _said(self) -> dict[str, object]:
        try:
            said = json.loads(os.pread(self._file, 4096, 0) or b"{}")
        except ValueError:  # cut off as its writer died
            said = {}
        return said if isinstance(said, dict) else {}

    def _refusal(self, directory: Path, said: dict[str, object]) -> ConfigError:
        return ConfigError(
            f"{directory} is written to by process {said.get('pid', '?')} on {said.get('host', '?')}; expected one run in a directory. "
            f"Wait for it, give this run another run.out, or, where that host has died, remove {self._path}"
        )


def _myself() -> dict[str, object]:
    """This process, so that nobody takes a later one with the same number for it."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": psutil.Process().create_time(),
        "job": os.environ.get(_JOB, ""),
    }


def _is_mine(said: dict[str, object]) -> bool:
    """The same job of Slurm, queued again: it never runs twice at once."""
    return bool(os.environ.get(_JOB)) and said.get("job") == os.environ[_JOB]


def _may_live(said: dict[str, object], passes_on: bool) -> bool:
    if said.get("host") != socket.gethostname():
        return True
    if passes_on:
        return False  # the lock was free, and it is given back with its process
    try:
        return bool(psutil.Process(int(str(said.get("pid", 0)))).create_time() == said.get("started"))
    except (psutil.Error, ValueError):
        return False
