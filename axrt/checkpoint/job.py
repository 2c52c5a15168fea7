"""Saving and loading by all ranks of a job together: each rank writes its own files, and the main
rank the manifest of all."""

import errno
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from shutil import rmtree
from typing import Any, NamedTuple

from axrt.device.thread_queue import ThreadQueue
from axrt.errors import AxrtError, ConfigError, DamagedError, SaveError
from axrt.runtime.errand import Errand, Put, Steps, at_once, run_on
from axrt.runtime.exchange import Exchange
from axrt.store.local_model import LocalModel
from axrt.transport.note import MAIN, Note, Topic

from .durable import sync
from .folder import (
    after,
    begin,
    candidates_at,
    check_name,
    folder_at,
    give_up,
    home_of,
    is_checkpoint,
    make_whole,
    named_latest,
    none_in,
    publish,
    set_aside,
    under_way,
)
from .in_memory import JobMemory, Recalled, to_stderr
from .joined import join
from .layers import check_layers, fault_in, files_of, take_layers
from .lock import DirectoryLock
from .manifest import FileRecord, Manifest
from .pieces import CheckedPieces
from .private import check_own_link
from .writing import Records

Checked = tuple[Manifest, Callable[[], None]]  # what was found, and what takes it


class _WentBack(NamedTuple):
    """The step that a run has gone back to in a folder of checkpoints, and the names of those that
    were damaged, whatever step they say."""

    step: int
    damaged: tuple[str, ...] = ()


class JobCheckpoints:
    """The checkpoints that this job saves and loads; every rank calls alike.

    Args:
        layers: class name of each layer of the model, in order.
        say: function that tells a person a text, on the main rank; None: print it to stderr.
        memory: copies in memory; None: there are none.
    Attributes:
        loaded: checkpoint that was loaded last; None before.
    """

    def __init__(
        self,
        exchange: Exchange,
        rank: int,
        layers: Sequence[str],
        say: Callable[[str], None] | None = None,
        memory: JobMemory | None = None,
    ) -> None:
        self._memory = memory
        self._exchange, self._rank, self._layers = exchange, rank, list(layers)
        self._say = say or to_stderr
        self._saves = 0
        self._under_way: Errand[str] | None = None
        self._locks: dict[Path, DirectoryLock] = {}
        self._went_back: dict[
            Path, _WentBack
        ] = {}  # by the folder of a run, until this job saves there
        self.loaded: Path | None = None

    # Saving.

    def save(
        self,
        checkpoint: Path,
        make_manifest: Callable[[], Manifest],
        write: Callable[[Path], Steps[Records]] | None,
        writers: Sequence[int],
        replaces: bool = False,
    ) -> None:
        """Write a checkpoint, after the end of the save that is under way, if any.

        Args:
            make_manifest: function that makes its manifest, without files; called on the main rank
                before anything is written.
            write: function that begins to write the layers of this rank into a directory; its steps
                come to the records of the files. None where other ranks write the same.
            replaces: True to remove a checkpoint that has the name, once this one is whole.
        Raises:
            ConfigError: the name means something else or is taken, another run writes to that
                folder, or the manifest cannot be made; raised on every rank. Nothing is written.
            SaveError: some file cannot be written; raised on every rank. Earlier checkpoints stand.
            DataError: some layer or optimizer has state that cannot be saved; raised where it is.
        """
        self._may_begin(checkpoint, waits=True)
        self.finish()
        manifest = self._begun(checkpoint, make_manifest, replaces)
        steps = self._steps(checkpoint, manifest, write, writers, at_once, replaces)
        errand = self._exchange.begin(steps)
        fault = self._exchange.finish(errand, f"all parts of {checkpoint}")
        if fault := self._exchange.broadcast(fault):
            raise SaveError(fault)

    def begin_to_save(
        self,
        checkpoint: Path,
        make_manifest: Callable[[], Manifest],
        write: Callable[[Path, Put], Steps[Records]] | None,
        writers: Sequence[int],
        then: Callable[[str], None],
        replaces: bool = False,
    ) -> bool:
        """Begin to write a checkpoint, which goes on beside what comes.

        Args:
            write: that of `save`, which also takes a function that puts the writing on a queue.
            then: function that is called on the main rank at the end, with "" or with what has gone
                wrong.
        Returns:
            False where an earlier save is still under way, on every rank. Then nothing is written.
        Raises:
            ConfigError, SaveError, DataError: those of `save`, as far as they are known at once.
        """
        if not self._may_begin(checkpoint, waits=False):
            return False
        manifest = self._begun(checkpoint, make_manifest, replaces)
        put = self._queue.put
        writing = (lambda directory: write(directory, put)) if write else None
        steps = self._steps(checkpoint, manifest, writing, writers, put, replaces)
        self._under_way = self._exchange.begin(self._told(steps, then))
        return True

    def _may_begin(self, checkpoint: Path, waits: bool) -> bool:
        """Every rank asks for the same; and none waits, or no save is under way on the main rank.

        Raises:
            AxrtError: this rank asks for something else than the main rank.
        """
        may = waits or self._under_way is None or self._under_way.done
        asked = (str(checkpoint), waits)
        may, *said = self._exchange.broadcast((may, *asked))
        if tuple(said) != asked:
            raise AxrtError(
                f"rank {self._rank} saves to {asked[0]} with wait = {waits}, and the main rank to "
                f"{said[0]} with wait = {said[1]}; expected the same on every rank"
            )
        return bool(may)

    def finish(self) -> str:
        """Wait for the end of the save that is under way, if any; every rank calls it.

        Returns:
            What has gone wrong; "" where nothing has.
        """
        errand, self._under_way = self._under_way, None
        if errand is None:
            return ""
        fault = self._exchange.finish(errand, "the end of a save")
        return str(self._exchange.broadcast(fault))

    def _begun(
        self, checkpoint: Path, make_manifest: Callable[[], Manifest], replaces: bool
    ) -> Manifest | None:
        """The manifest of a checkpoint that may be written now, on the main rank."""
        manifests: list[Manifest] = []

        def prepared() -> None:
            manifests.append(make_manifest())
            self._prepare(checkpoint, manifests[0].step, replaces)

        self._exchange.agreed(prepared)
        self._saves += 1
        return manifests[0] if manifests else None

    def _steps(
        self,
        checkpoint: Path,
        manifest: Manifest | None,
        write: Callable[[Path], Steps[Records]] | None,
        writers: Sequence[int],
        put: Put,
        replaces: bool,
    ) -> Steps[str]:
        """The steps of this rank, which has begun to write when this returns; on the main rank they
        come to what has gone wrong."""
        steps: Steps[Records] | None = None
        if write:
            try:
                steps = write(under_way(checkpoint))
            except SaveError as error:  # others wait to be told
                steps = _failed(error)
        return self._writing(self._saves, checkpoint, manifest, steps, writers, put, replaces)

    def _writing(
        self,
        number: int,
        checkpoint: Path,
        manifest: Manifest | None,
        steps: Steps[Records] | None,
        writers: Sequence[int],
        put: Put,
        replaces: bool,
    ) -> Steps[str]:
        if steps is not None:
            told = yield from _outcome(steps)
            if self._rank in writers:
                self._exchange.tell(MAIN, Note(Topic.SAVED, self._rank, number), told)
        if manifest is None:
            return ""
        saved = self._exchange.claim(Topic.SAVED, number, writers)
        yield saved
        publishing = run_on(
            put, lambda: self._publish(checkpoint, manifest, saved.in_order(), replaces)
        )
        fault = yield from _outcome(publishing)
        if fault is None:
            return ""
        give_up(checkpoint)
        return f"{fault}; {checkpoint} is not saved, what was saved before stands"

    def _told(self, steps: Steps[str], then: Callable[[str], None]) -> Steps[str]:
        fault = yield from steps
        if self._rank == MAIN:
            then(fault)
        return fault

    def _prepare(self, checkpoint: Path, step: int, replaces: bool) -> None:
        """Refuse a checkpoint that cannot be saved under its name, before anything is written; on
        the main rank."""
        check_name(checkpoint, step)
        folder = checkpoint.parent
        if (
            checkpoint.exists()
            and not (replaces and is_checkpoint(checkpoint))
            and checkpoint not in self._to_set_aside(folder)
            and not self._is_damaged(checkpoint)
        ):
            raise ConfigError(f"{checkpoint} exists; expected the name of a new checkpoint")
        self._lock(folder)
        begin(checkpoint)

    def _is_damaged(self, checkpoint: Path) -> bool:
        return is_checkpoint(checkpoint) and bool(fault_in(checkpoint))

    def _lock(self, folder: Path) -> None:
        """Keep other runs from writing to a folder until `close`."""
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

    def _publish(
        self, checkpoint: Path, manifest: Manifest, outcomes: Sequence[Any], replaces: bool
    ) -> None:
        for outcome in outcomes:
            if isinstance(outcome, str):
                raise SaveError(outcome)
        records = {
            name: FileRecord(**record) for outcome in outcomes for name, record in outcome.items()
        }
        if missing := sorted(files_of(len(self._layers)) - records.keys()):
            raise SaveError(f"{missing[0]} was written by no rank")
        make_whole(checkpoint, manifest, records)
        self._set_aside(checkpoint.parent)
        if checkpoint.exists() and not replaces:
            self._say(set_aside(checkpoint.parent, "damaged", [checkpoint]))
        publish(checkpoint)

    def _to_set_aside(self, folder: Path) -> list[Path]:
        back = self._went_back.get(folder.resolve())
        if back is None:
            return []
        later = after(folder, back.step)
        return later + [
            folder / name
            for name in back.damaged
            if folder / name not in later and (folder / name).exists()
        ]

    def _set_aside(self, folder: Path) -> None:
        """Set later checkpoints aside where this job has gone back to an older one, before it
        writes others."""
        if paths := self._to_set_aside(folder):
            self._say(
                set_aside(folder, f"after-step-{self._went_back[folder.resolve()].step:08}", paths)
            )
        if self._memory and folder.resolve() in self._went_back:
            try:
                self._memory.void(folder)
            except OSError as error:
                raise SaveError(f"{folder}: {error.strerror}") from None
        self._went_back.pop(folder.resolve(), None)

    # Loading.

    def load(self, path: Path, model: LocalModel, missing_ok: bool) -> Manifest | None:
        """Take weights and optimizer state from the newest undamaged checkpoint that a path means.

        Args:
            model: part of the model that this rank holds; its weights and optimizers are changed in
                place.
            missing_ok: True to return None, and not to raise, where there is none at all.
        Raises:
            ConfigError: there is none, it is of another model, or all are damaged; raised on every
                rank. Nothing is changed.
            AxrtError: a file has changed since all ranks have found it undamaged; part of the
                checkpoint has been taken.
        """
        self.finish()
        faults: dict[Path, str] = {}
        offered, folder = self._exchange.agreed(lambda: _offered(path))
        if folder and not offered and (kept := self._recalled(Path(folder), -1, model)):
            return kept
        for checkpoint, fault, step in ((Path(where), *of) for where, *of in offered):
            if folder and not fault and (kept := self._recalled(Path(folder), step, model)):
                self._say_damaged(faults)
                return kept
            manifest = fault or self._try(checkpoint, model)
            if isinstance(manifest, Manifest):
                self._has_loaded(path, checkpoint, manifest, faults)
                return manifest
            faults[checkpoint] = manifest
        if folder and faults and (kept := self._recalled(Path(folder), -1, model)):
            self._say_damaged(faults)
            return kept
        if not offered and missing_ok:
            return None
        raise DamagedError("; ".join(faults.values())) if faults else none_in(path)

    def _recalled(self, folder: Path, newer_than: int, model: LocalModel) -> Manifest | None:
        """Take what memory has, if that is newer than a step: each rank its own part, or what parts
        of several ranks come to.

        Raises:
            ConfigError: it is of another model or optimizer; raised on every rank.
        """
        if self._memory is None:
            return None
        recalled = self._memory.recall(folder, newer_than, model)
        manifest = self._taken_from_memory(recalled, model) if recalled.parts else None
        text = f"not taken from memory: {manifest}" if isinstance(manifest, str) else recalled.text
        if self._rank == MAIN and text:
            self._say(text)
        if not isinstance(manifest, Manifest):
            return None
        self._memory.go_on(folder)
        self.loaded = recalled.parts[0]
        self._went_back[folder.resolve()] = _WentBack(manifest.step)
        return manifest

    def _taken_from_memory(self, recalled: Recalled, model: LocalModel) -> Manifest | str:
        """What has been taken, or what is damaged."""
        parts, joined = recalled.parts, recalled.joined

        def check() -> Checked:
            if recalled.fault:
                raise DamagedError(recalled.fault)
            manifest = self._of_this_model(parts[0])
            if joined is None and model.is_sharded:
                return manifest, CheckedPieces(parts[0], manifest, model).take
            if joined:
                manifest = join(joined, parts, model)
            return manifest, partial(
                take_layers, check_layers(joined or parts[0], manifest, model), model
            )

        try:
            return self._taken(check)
        finally:
            if joined:
                rmtree(joined, ignore_errors=True)

    def _try(self, checkpoint: Path, model: LocalModel) -> Manifest | str:
        """Take a checkpoint if every rank finds its part undamaged; else return what is wrong, and
        change nothing."""
        manifest = Manifest(
            **self._exchange.agreed(lambda: asdict(self._of_this_model(checkpoint)))
        )

        def check() -> Checked:
            return manifest, partial(take_layers, check_layers(checkpoint, manifest, model), model)

        return self._taken(check)

    def _taken(self, check: Callable[[], Checked]) -> Manifest | str:
        """Take what a check gives the way to, if no rank's check has found anything wrong."""
        checked, damage, refusal = None, None, None
        try:
            checked = check()
        except (DamagedError, SaveError) as error:
            damage = str(error)
        except ConfigError as error:
            refusal = str(error)
        found = self._exchange.gathered((refusal, damage))
        refusal, damage = self._exchange.broadcast(_worst(found) if found else None)
        if refusal is not None:
            raise ConfigError(refusal)
        if damage is not None:
            return str(damage)
        assert checked is not None
        manifest, take = checked
        take()
        return manifest

    def _of_this_model(self, checkpoint: Path) -> Manifest:
        manifest = Manifest.read(checkpoint)
        if manifest.layers != self._layers:
            raise ConfigError(
                f"{checkpoint} has layers {manifest.layers}, and the model {self._layers}; "
                "expected a checkpoint of the same model"
            )
        return manifest

    def _has_loaded(
        self, asked: Path, checkpoint: Path, manifest: Manifest, faults: Mapping[Path, str]
    ) -> None:
        self.loaded = checkpoint
        if self._rank != MAIN:
            return
        folder = checkpoint.parent
        if faults:
            self._say_damaged(faults, f". Taken is {checkpoint}, the newest undamaged one")
        elif checkpoint != asked and (named := named_latest(folder)) not in (None, checkpoint.name):
            self._say(
                f"{folder / 'latest'} names {str(named)[:80]!r}; taken is {checkpoint.name}. To "
                "take another, give its own path"
            )
        self._went_back[home_of(checkpoint)] = _WentBack(
            manifest.step, tuple([path.name for path in faults])
        )

    def _say_damaged(self, faults: Mapping[Path, str], then: str = "") -> None:
        if faults and self._rank == MAIN:
            self._say(f"damaged, and not taken: {'; '.join(faults.values())}{then}")

    def own(self, folder: Path, step: int) -> None:
        """Make a folder this run's own: no other run writes there until `close`, and later
        checkpoints are set aside now.

        Args:
            folder: folder of checkpoints; it is made where there is none.
            step: number of steps; checkpoints with more are set aside.
        Raises:
            ConfigError: another run writes there; raised on every rank.
            SaveError: something cannot be written or moved; raised on every rank.
        """

        self.finish()

        def begin_there() -> None:
            self._lock(folder)
            self._went_back[folder.resolve()] = self._went_back.get(
                folder.resolve(), _WentBack(step)
            )._replace(step=step)
            self._set_aside(folder)

        self._exchange.agreed(begin_there)

    @cached_property
    def _queue(self) -> ThreadQueue:
        """The queue on which files are written while training goes on."""
        return ThreadQueue("axrt saves")

    def close(self) -> None:
        """Release the locks, so that other runs may write where this job has. A file that is being
        written, of a save that nobody will end, is written before."""
        if "_queue" in vars(self):
            self._queue.drain()
        for lock in self._locks.values():
            lock.release()
        self._locks.clear()


def _offered(path: Path) -> tuple[list[tuple[str, str, int]], str]:
    """The path, the manifest's fault and the step of each checkpoint that a path means; and the
    folder of a run that may have copies in memory, "" where a path means one checkpoint. Refused
    where the first one has an unknown format."""
    candidates = candidates_at(path)
    if candidates and candidates[0].is_foreign:
        raise ConfigError(candidates[0].fault)
    offered = [(str(one.path), one.fault, one.step) for one in candidates]
    if is_checkpoint(path):
        return offered, ""
    return offered, str(candidates[0].path.parent if candidates else folder_at(path))


def _failed(error: SaveError) -> Steps[Records]:
    """Steps that have failed before the first one."""
    yield from ()
    raise error


def _outcome(steps: Steps[Any]) -> Steps[Any]:
    """What steps come to, or the text of the error that has ended them, for which other ranks
    wait."""
    try:
        found = yield from steps
    except (SaveError, ConfigError, OSError) as error:
        return str(error)
    return {name: asdict(of) for name, of in found.items()} if isinstance(found, dict) else found


def _worst(found: Sequence[tuple[str | None, str | None]]) -> tuple[str | None, str | None]:
    """The first refusal and the first damage that any rank has found."""
    refusals, damages = zip(*found, strict=True)
    return next(filter(None, refusals), None), next(filter(None, damages), None)
