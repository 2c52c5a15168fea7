"""Loading by all ranks of a job together: the newest state that every rank finds undamaged, on a
disk or in memory."""

# A load takes nothing before all ranks have looked at their part. So what is refused, or damaged on
# one rank, leaves every rank as it was, and the next candidate is tried by all.
#
# Candidates are tried from the newest on: on a disk, and in memory, where that is newer. One is
# passed over only if it is damaged. One of another model, optimizer or format ends the load: it is
# what the user has named, and an older one in its place would be another run without a word.
#
# The main rank alone lists the folder, and tells what it has found. Ranks that listed for
# themselves could see different checkpoints on a file system that is slow to show new ones, and
# would wait for each other over different files.

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from shutil import rmtree

from axrt.errors import ConfigError, DamagedError, SaveError
from axrt.runtime.exchange import Exchange
from axrt.store.local_model import LocalModel
from axrt.transport.control import MAIN

from .folder import candidates_at, folder_at, home_of, is_checkpoint, named_latest, none_in
from .in_memory import JobMemory, Recalled
from .joined import join
from .layers import check_layers, take_layers
from .manifest import Manifest
from .own_folders import OwnFolders
from .pieces import CheckedPieces

Checked = tuple[Manifest, Callable[[], None]]  # what was found, and what takes it


class Loading:
    """Loads for one job; every rank calls alike.

    Args:
        layers: class name of each layer of the model, in order.
        say: function that tells a person a text, on the main rank.
        memory: copies in memory; None: there are none.
        folders: folders that the job writes to.
    Attributes:
        loaded: checkpoint that was loaded last; None before.
    """

    def __init__(
        self,
        exchange: Exchange,
        rank: int,
        layers: Sequence[str],
        say: Callable[[str], None],
        memory: JobMemory | None,
        folders: OwnFolders,
    ) -> None:
        self._exchange, self._rank, self._layers = exchange, rank, list(layers)
        self._say, self._memory, self._folders = say, memory, folders
        self.loaded: Path | None = None

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
        self._folders.goes_back(folder, manifest.step)
        return manifest

    def _taken_from_memory(self, recalled: Recalled, model: LocalModel) -> Manifest | str:
        """What has been taken, or what is damaged."""
        parts, joined = recalled.parts, recalled.joined

        def check() -> Checked:
            if recalled.fault:
                raise DamagedError(recalled.fault)
            manifest = self._of_this_model(parts[0])
            if joined is None and model.is_in_parts:
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
        self._folders.goes_back(home_of(checkpoint), manifest.step, [path.name for path in faults])

    def _say_damaged(self, faults: Mapping[Path, str], then: str = "") -> None:
        if faults and self._rank == MAIN:
            self._say(f"damaged, and not taken: {'; '.join(faults.values())}{then}")


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


def _worst(found: Sequence[tuple[str | None, str | None]]) -> tuple[str | None, str | None]:
    """The first refusal and the first damage that any rank has found."""
    refusals, damages = zip(*found, strict=True)
    return next(filter(None, refusals), None), next(filter(None, damages), None)
