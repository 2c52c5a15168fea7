"""What an engine saves and loads: checkpoints on a disk, and copies in the memory of hosts."""

import sys
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from axrt.checkpoint.in_memory import JobMemory
from axrt.checkpoint.job import JobCheckpoints
from axrt.checkpoint.manifest import Manifest
from axrt.checkpoint.pieces import cut_of
from axrt.checkpoint.snapshot import Snapshot, SnapshotArena
from axrt.checkpoint.team_writing import save_team
from axrt.checkpoint.writing import Records, keep_layers, save_layers, save_shards
from axrt.errors import SaveError
from axrt.runtime.coroutine import Put, Steps

from .parts import EngineParts


class Position(NamedTuple):
    """How far a training has come."""

    step: int  # steps that are done
    samples: int  # of the data that they have used up
    extra: Mapping[str, Any]  # values of the user's


class Saves:
    """Saves of one model's state, and of how far its training has come.

    Args:
        layers: names of the model's layers.
    """

    def __init__(
        self,
        checkpoints: JobCheckpoints,
        memory: JobMemory,
        parts: EngineParts,
        layers: list[str],
    ) -> None:
        self._checkpoints, self._memory = checkpoints, memory
        self._config, self._rank, self._job = parts.config, parts.rank, parts.job
        self._model, self._shards, self._layers = parts.model, parts.shards, layers
        rank, job, first = parts.rank, parts.job, parts.trainer.ranks_of_replica(0)
        # Replicas but the first hold the same, where state is not sharded, and so do pipes but the
        # first.
        self._together = job.shards or job.team > 1  # layers come together where they are written
        self._writers = list(range(rank.size)) if self._together else first
        self._snapshot: Snapshot | None = None

    def save(self, path: Path, at: Position, replaces: bool) -> None:
        """Save a checkpoint, which is whole then; see `Engine.save_checkpoint`."""
        make, writers = self._manifest(at), self._writers
        self._checkpoints.save(path, make, self._writing(), writers, replaces=replaces)

    def begin_to_save(
        self, path: Path, at: Position, then: Callable[[str], None] | None, replaces: bool
    ) -> bool:
        """The same beside later calls; False, and nothing is saved, where an earlier save is under
        way."""
        snapshot = Snapshot(self.arena)
        writing = self._writing_beside(snapshot)
        has_begun = self._checkpoints.begin_to_save(
            path, self._manifest(at), writing, self._writers, then or _tell_fault, replaces
        )
        if has_begun:
            self._snapshot = snapshot
        return has_begun

    def finish(self) -> None:
        """Wait for the end of what is under way.

        Raises:
            SaveError: files could not be written; raised on every rank.
        """
        self._memory.finish()
        if fault := self._checkpoints.finish():
            raise SaveError(fault)

    def finish_at_the_end(self) -> None:
        """The same when no later call could hear of a fault."""
        self._checkpoints.finish()
        self._memory.finish()

    def keep_in_memory(self, folder: Path, at: Position) -> None:
        """Copy this rank's state to the memory of hosts, beside later calls."""
        keep = lambda path, queue: keep_layers(path, self._model, queue)  # noqa: E731
        self._memory.keep(folder, cut_of(self._model), self._manifest(at), keep)

    def drop_memory(self, folder: Path) -> None:
        """Remove a run's copies in memory."""
        self._memory.drop(folder)

    def load(self, path: Path, missing_ok: bool) -> Manifest | None:
        """Load weights, optimizer state and loss scale; see `Engine.load_checkpoint`.

        Returns:
            The checkpoint's manifest; None where there is none and that is allowed.
        """
        self._model.shown.clear()  # what was written to copies is of before
        manifest = self._checkpoints.load(path, self._model, missing_ok)
        if manifest and self._model.loss_scale:
            self._model.loss_scale.restore(manifest.step, manifest.loss_scale)
        return manifest

    def own(self, folder: Path, step: int) -> None:
        """Make a directory of checkpoints this run's own; later steps are set aside."""
        self._checkpoints.own(folder, step)

    def end_reading(self) -> None:
        """Wait until a save that is under way has read what it saves."""
        if self._snapshot:
            self._snapshot.end()

    def close(self) -> None:
        """Let other runs have the directories."""
        self._checkpoints.close()

    @property
    def loaded(self) -> Path | None:
        """The checkpoint that was loaded last; None before."""
        return self._checkpoints.loaded

    @cached_property
    def arena(self) -> SnapshotArena:
        """Memory of the host for snapshots."""
        return SnapshotArena(self._rank.device, self._config.memory.uses_scratch)

    def _manifest(self, at: Position) -> Callable[[], Manifest]:
        """What makes the manifest of the state of now, without files."""
        loss_scale = self._model.loss_scale
        scale = loss_scale.saved(at.step) if loss_scale else None
        of = (at.step, at.samples, self._model.lr, self._layers, self._config, at.extra, scale)
        return partial(Manifest.of, *of)

    def _writing(self) -> Callable[[Path], Steps[Records]] | None:
        """What writes the layers of this rank into a checkpoint."""
        if self._together:
            save = save_shards if self._job.shards else save_team
            return lambda directory: save(directory, self._model, self._shards)
        mine = self._model.of_pipe(0)
        is_first = self._rank.mesh.data_rank == 0
        return (lambda directory: save_layers(directory, mine)) if is_first else None

    def _writing_beside(self, snapshot: Snapshot) -> Callable[[Path, Put], Steps[Records]] | None:
        """The same, from a snapshot."""
        if self._rank.number not in self._writers:
            return None
        if self._together:
            save = save_shards if self._job.shards else save_team
            return lambda directory, put: save(directory, self._model, self._shards, snapshot, put)
        return lambda directory, put: save_layers(directory, self._model.of_pipe(0), snapshot, put)


def _tell_fault(fault: str) -> None:
    if fault:
        print(f"axrt: {fault}", file=sys.stderr, flush=True)
