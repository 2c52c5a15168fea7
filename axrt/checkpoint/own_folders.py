"""The folders of checkpoints that this job writes to: no other run may, and what is later than
the step that this run has gone back to is set aside before anything is written."""

# A run that has gone back to step 100 must not leave checkpoints of step 260 that a later load
# would find newest. But it may also have been started to look, and save nothing. So later ones are
# moved away with its next save, not at the load, and moved, not removed. Damaged ones go with them,
# whatever step they say.

import errno
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from axrt.errors import ConfigError, SaveError

from .durable import sync
from .folder import after, set_aside
from .in_memory import JobMemory
from .lock import DirectoryLock
from .private import check_own_link


class _WentBack(NamedTuple):
    """The step that a run has gone back to in a folder of checkpoints, and the names of those that
    were damaged, whatever step they say."""

    step: int
    damaged: tuple[str, ...] = ()


class OwnFolders:
    """Folders on the main rank, which alone locks and moves.

    Args:
        say: function that tells a person a text.
        memory: copies in memory; None: there are none.
    """

    def __init__(self, say: Callable[[str], None], memory: JobMemory | None) -> None:
        self._say, self._memory = say, memory
        self._locks: dict[Path, DirectoryLock] = {}
        # by the folder of a run, until this job saves there
        self._went_back: dict[Path, _WentBack] = {}

    def goes_back(self, folder: Path, step: int, damaged: Sequence[str] = ()) -> None:
        """Note that the run goes on from a step.

        Args:
            damaged: names of checkpoints there that are damaged, whatever step they say.
        """
        self._went_back[folder.resolve()] = _WentBack(step, tuple(damaged))

    def own(self, folder: Path, step: int) -> None:
        """Lock a folder, and set aside what is later than a step.

        Raises:
            ConfigError: another run writes there, or it can be no directory.
            SaveError: it cannot be written to.
        """
        self.lock(folder)
        known = self._went_back.get(folder.resolve(), _WentBack(step))
        self._went_back[folder.resolve()] = known._replace(step=step)
        self.set_aside(folder)

    def lock(self, folder: Path) -> None:
        """Keep other runs from writing to a folder until `close`; errors are those of `own`."""
        check_own_link(folder)
        folder = folder.resolve()
        if folder in self._locks:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            sync(folder.parent)
            self._locks[folder] = DirectoryLock(folder)
        except (FileExistsError, NotADirectoryError) as error:
            raise ConfigError(
                f"{folder}: {error.strerror}; expected a directory that checkpoints can be written "
                "to"
            ) from None
        except OSError as error:
            text = f"nothing can be saved to {folder}: {error.strerror}; expected a directory that "
            if error.errno in (errno.EINVAL, errno.EISDIR, errno.ELOOP):  # no file: it stays so
                where = error.filename or folder
                raise ConfigError(
                    f"{where}: {error.strerror}; expected a regular file, or none"
                ) from None
            raise SaveError(f"{text}checkpoints can be written to") from None

    def to_set_aside(self, folder: Path) -> list[Path]:
        """The checkpoints that are later than what the run has gone back to."""
        back = self._went_back.get(folder.resolve())
        if back is None:
            return []
        later = after(folder, back.step)
        return later + [
            folder / name
            for name in back.damaged
            if folder / name not in later and (folder / name).exists()
        ]

    def set_aside(self, folder: Path) -> None:
        """Set later checkpoints aside where this job has gone back to an older one, before it
        writes others."""
        if paths := self.to_set_aside(folder):
            self._say(
                set_aside(folder, f"after-step-{self._went_back[folder.resolve()].step:08}", paths)
            )
        if self._memory and folder.resolve() in self._went_back:
            try:
                self._memory.void(folder)
            except OSError as error:
                raise SaveError(f"{folder}: {error.strerror}") from None
        self._went_back.pop(folder.resolve(), None)

    def close(self) -> None:
        """Release the locks, so that other runs may write where this job has."""
        for lock in self._locks.values():
            lock.release()
        self._locks.clear()
