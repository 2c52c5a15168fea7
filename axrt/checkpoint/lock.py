"""One run writes to a directory: a second one is refused by name of host and process."""

# The lock is the system's own (`flock`), held as long as the process lives: that of a dead process
# on the same host is simply free. A file system may not pass locks on to other hosts. For them the
# file names the process that writes, which renews the file's time as long as it lives: a lock that
# was not renewed for five minutes is taken over. A time that lies in the future says nothing of the
# lock's age: it is set to now by whoever wants to write, so that five minutes later it has one.

import fcntl
import json
import os
import socket
import tempfile
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path

import psutil

from axrt.errors import ConfigError
from axrt.scheduler.regular_file import MALFORMED, json_of, open_regular, read_text

_NAME = ".lock"
_RENEWED_EVERY_S, _STALE_S = 30.0, 300.0


class DirectoryLock:
    """The lock of a directory, held from when it is made until `release`.

    Raises:
        ConfigError: another process writes to it.
        OSError: nothing can be written to the directory.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / _NAME
        # Not for writing: that would keep an administrator from making the disk read-only.
        flags = os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW
        self._file = open_regular(self._path, flags, 0o644)
        self._stopped = threading.Event()
        self._release = weakref.finalize(self, _release, self._file, self._path, self._stopped)
        try:
            self._take(directory)
        except BaseException:
            self._release.detach()
            os.close(self._file)
            raise
        threading.Thread(
            target=_renew, args=(self._path, self._stopped), name="axrt lock", daemon=True
        ).start()

    def release(self) -> None:
        """Let other processes write there; the end of this process does that, too."""
        self._release()

    def _take(self, directory: Path) -> None:
        passes_on = True  # the file system keeps locks at all
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if (
                self._said() == _myself()
            ):  # another engine of this process, which cannot write at the same time
                return
            raise self._refusal(directory, self._said()) from None
        except OSError:
            passes_on = False
        said = self._said()
        if said and not _is_before_me(said) and self._may_live(said, passes_on):
            raise self._refusal(directory, said)
        _write(self._path, json.dumps(_myself()).encode())

    def _may_live(self, said: dict[str, object], passes_on: bool) -> bool:
        if said.get("host") != socket.gethostname():
            return _age_s(self._path, self._file) < _STALE_S
        if passes_on:
            return False  # the lock was free, and it is given back with its process
        return _lives(_number(said.get("pid")), said.get("started"))

    def _said(self) -> dict[str, object]:
        try:
            said = json_of(os.pread(self._file, 4096, 0) or b"{}")
        except ValueError:  # cut off as its writer died
            said = {}
        return said if isinstance(said, dict) else {}

    def _refusal(self, directory: Path, said: dict[str, object]) -> ConfigError:
        return ConfigError(
            f"{directory} is written to by process {said.get('pid', '?')} on "
            f"{said.get('host', '?')}; expected one run in a directory. "
            "Wait for it, or give this run another run.out. If that process has died, wait "
            f"{_STALE_S:.0f} s, or remove {self._path}"
        )


def holder_of(directory: Path) -> str | None:
    """The host and process that write to a directory, as far as its lock tells; None: nobody. The
    lock itself is not touched, so nobody who takes it meanwhile is refused."""
    path = directory / _NAME
    try:
        said = json_of(read_text(path) or "{}")
        host, pid = str(said["host"]), int(said["pid"])
        age_s = time.time() - path.stat().st_mtime
    except (OSError, *MALFORMED):
        return None
    is_here = host == socket.gethostname()
    lives = _lives(pid, said.get("started")) if is_here else age_s < _STALE_S
    return f"{host}, process {pid}" if lives else None


def _lives(pid: int, started: object) -> bool:
    try:
        return bool(psutil.Process(pid).create_time() == started)
    except (psutil.Error, *MALFORMED):
        return False


def _myself() -> dict[str, object]:
    """This process, in terms that no later process with the same number shares."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": psutil.Process().create_time(),
        "job": os.environ.get("SLURM_JOB_ID", ""),
        "restart": int(os.environ.get("SLURM_RESTART_COUNT", "0")),
    }


def _is_before_me(said: dict[str, object]) -> bool:
    """The lock's writer is an earlier start of the same Slurm job, which is queued again only when
    it has ended."""
    me = _myself()
    return (
        bool(me["job"])
        and said.get("job") == me["job"]
        and _number(said.get("restart")) < _number(me["restart"])
    )


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0


def _age_s(path: Path, file: int) -> float:
    """Seconds since the file was renewed, by the clock of the file system."""
    probe, name = tempfile.mkstemp(prefix=f"{path.name}-", dir=path.parent)
    try:
        age_s = os.fstat(probe).st_mtime - os.fstat(file).st_mtime
    finally:
        os.close(probe)
        os.unlink(name)
    if age_s < 0:
        with suppress(OSError):  # of another user
            os.utime(file)
    return age_s


def _write(path: Path, data: bytes) -> None:
    with open(open_regular(path, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW), "wb") as file:
        file.write(data)


def _renew(path: Path, stopped: threading.Event) -> None:
    while not stopped.wait(_RENEWED_EVERY_S):
        with suppress(OSError):
            os.utime(path)


def _release(file: int, path: Path, stopped: threading.Event) -> None:
    stopped.set()
    with suppress(OSError):
        _write(path, b"")
    os.close(file)
