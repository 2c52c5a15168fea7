"""The checkpoints that a run saves."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from axrt.checkpoint.folder import check_writable, name_latest, prune
from axrt.engine import Engine
from axrt.errors import SaveError

from .main_rank import on_main
from .record import Record


# A save that is due while another is under way is left out. Waiting was thought of: a disk that
# hangs would stop all ranks.
class Saves:
    """The checkpoints that this run saves.

    A save that fails is told, and training goes on: the next one may succeed. Only that of the last
    step matters for how the run ends. One that is due while another is still being written is left
    out, and told.

    Args:
        record: record of the main rank; None on the others.
    Attributes:
        folder: folder of checkpoints; None where nothing is saved.
        newest: checkpoint that was saved last, or that the run has gone on from, on the main rank;
            None where there is none.
        failed: True if the save of the last step has failed.
    Raises:
        ConfigError: nothing can be written; raised on every rank, and before there is anything to
            lose.
    """

    def __init__(
        self, engine: Engine, record: Record | None, directory: Path, extra: Mapping[str, Any]
    ) -> None:
        self._engine, self._record, self._config = engine, record, engine.config.checkpoint
        self._extra = extra
        self.folder = directory / self._config.dir if self._config.dir else None
        self.newest: Path | None = None
        self.failed = False
        self._beside = engine.config.saves_beside
        loaded = engine.loaded_from
        if self.folder and loaded and loaded.parent.resolve() == self.folder.resolve():
            self.newest = loaded
        self._asked = self.newest  # on every rank
        if self.folder is not None:
            on_main(engine, partial(check_writable, self.folder))
            # last: a refusal before this leaves the folder as it was
            engine.own_checkpoints(self.folder)
        if record and self.newest is not None:
            name_latest(self.newest)

    def after(self, done: int, last: bool) -> None:
        """Save if a checkpoint is due.

        Args:
            last: True for the end of the run.
        """
        every = self._config.memory_every
        if self.folder and every and done % every == 0 and not last:
            self._engine.keep_in_memory(self.folder, self._extra)
        if self.folder is None or not (
            last or (self._config.every and done % self._config.every == 0)
        ):
            return
        path = self.folder / f"step-{done:08}"
        if self._asked and self._asked.name == path.name and not (last and self._has_failed()):
            return  # it is written, or the run has gone on from there, and no step since
        beside = self._beside and not last
        try:
            begun = self._engine.save_checkpoint(
                path, self._extra, wait=not beside, then=partial(self._ended, path, done)
            )
        except SaveError as error:
            self._ended(path, done, str(error), last)
            return
        if not begun:
            self._warn(done, f"{self._asked} is still being written; save less often, or faster")
            return
        self._asked = path
        if self._record:
            self._record.saved(done)
        if not beside:
            self._ended(path, done, "")

    def end(self) -> None:
        """Let go of copies in memory, where a checkpoint has all steps."""
        if self.folder and not self._engine.broadcast(self.failed):
            self._engine.drop_memory(self.folder)

    def _has_failed(self) -> bool:
        """Wait for the save that is under way; True if it could not be written."""
        try:
            self._engine.finish_saving()
        except SaveError:
            return True
        return False

    def _ended(self, path: Path, done: int, fault: str, last: bool = False) -> None:
        """Note how a save has ended."""
        if fault:
            self.failed = last
            self._warn(done, fault, last)
            return
        self.newest = path
        if self._record and self.folder:
            try:
                prune(self.folder, self._config.keep, path)
            except OSError as error:
                self._record.warn(f"step {done}: older checkpoints are not removed: {error}")

    def _warn(self, done: int, why: str, last: bool = False) -> None:
        if self._record:
            what = "the last one" if last else "training goes on, and the next one will be tried"
            self._record.warn(f"step {done}: no checkpoint ({what}): {why}")
