"""Saving and loading by all ranks of a job together: each rank writes its own files, and the main
rank the manifest of all."""

#   agree      every rank asks for the same save; the main rank looks at name, lock and disk
#   write      each rank that writes has files of its own in `step-N.partial`, and tells the main
#              rank the size and digest of each, or what has gone wrong
#   publish    the main rank writes the manifest, renames the directory, then names it in `latest`
#
# Each layer has a file of weights and one of optimizer state, by name, so a checkpoint knows no
# layout: any number of ranks takes one that any other number has written. Replica 0 writes; where
# each copy has a shard of the state, the others send it theirs.
#
# A rank that cannot write still tells: the main rank waits for each writer's word. With one fault
# the save has failed on all ranks, `.partial` is removed, and what was saved before stands. A rank
# that dies leaves `.partial` behind, which no load looks at and the next save removes.
#
# Whether the save is waited for or goes on beside training is said by `put` alone: the steps are
# one coroutine (`runtime/coroutine.py`), whose writing is done here and now or on a thread. A
# second save that comes while one is under way is not begun, on any rank; the main rank's word
# decides, as it is the last to be done with one.

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from axrt.device.thread_queue import ThreadQueue
from axrt.errors import AxrtError, ConfigError, SaveError
from axrt.runtime.coroutine import Coroutine, Put, Steps, at_once, run_on
from axrt.runtime.exchange import Exchange
from axrt.store.local_model import LocalModel
from axrt.transport.control import MAIN, ControlMessage, Topic

from .folder import (
    begin,
    check_name,
    give_up,
    is_checkpoint,
    make_whole,
    publish,
    set_aside,
    under_way,
)
from .in_memory import JobMemory, to_stderr
from .layers import fault_in, files_of
from .loading import Loading
from .manifest import FileRecord, Manifest
from .own_folders import OwnFolders
from .writing import Records


class JobCheckpoints:
    """The checkpoints that this job saves and loads; every rank calls alike.

    Args:
        layers: class name of each layer of the model, in order.
        say: function that tells a person a text, on the main rank; None: print it to stderr.
        memory: copies in memory; None: there are none.
    """

    def __init__(
        self,
        exchange: Exchange,
        rank: int,
        layers: Sequence[str],
        say: Callable[[str], None] | None = None,
        memory: JobMemory | None = None,
    ) -> None:
        self._exchange, self._rank, self._layers = exchange, rank, list(layers)
        self._say = say or to_stderr
        self._saves = 0
        self._under_way: Coroutine[str] | None = None
        self._folders = OwnFolders(self._say, memory)
        self._loading = Loading(exchange, rank, layers, self._say, memory, self._folders)

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
        coroutine = self._exchange.begin(steps)
        fault = self._exchange.finish(coroutine, f"all parts of {checkpoint}")
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
        coroutine, self._under_way = self._under_way, None
        if coroutine is None:
            return ""
        fault = self._exchange.finish(coroutine, "the end of a save")
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
                self._exchange.tell(MAIN, ControlMessage(Topic.SAVED, self._rank, number), told)
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
            and checkpoint not in self._folders.to_set_aside(folder)
            and not self._is_damaged(checkpoint)
        ):
            raise ConfigError(f"{checkpoint} exists; expected the name of a new checkpoint")
        self._folders.lock(folder)
        begin(checkpoint)

    def _is_damaged(self, checkpoint: Path) -> bool:
        return is_checkpoint(checkpoint) and bool(fault_in(checkpoint))

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
        self._folders.set_aside(checkpoint.parent)
        if checkpoint.exists() and not replaces:
            self._say(set_aside(checkpoint.parent, "damaged", [checkpoint]))
        publish(checkpoint)

    # Loading, and what is this run's own.

    def load(self, path: Path, model: LocalModel, missing_ok: bool) -> Manifest | None:
        """Load after the end of the save that is under way, if any; see `Loading.load`."""
        self.finish()
        return self._loading.load(path, model, missing_ok)

    @property
    def loaded(self) -> Path | None:
        """The checkpoint that was loaded last; None before."""
        return self._loading.loaded

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
        self._exchange.agreed(lambda: self._folders.own(folder, step))

    @cached_property
    def _queue(self) -> ThreadQueue:
        """The queue on which files are written while training goes on."""
        return ThreadQueue("axrt saves")

    def close(self) -> None:
        """Release the locks, so that other runs may write where this job has. A file that is being
        written, of a save that nobody will end, is written before."""
        if "_queue" in vars(self):
            self._queue.drain()
        self._folders.close()


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
