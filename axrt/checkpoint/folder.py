"""The folder of a run's checkpoints: which ones exist, how one is written, how the newest is found,
and which ones are set aside."""

#   checkpoints/
#     latest                            the name of the newest, for people; nothing is decided by it
#     .lock                             the process that writes here
#     step-00000260/
#       manifest.json                   see `manifest.py`
#       layer-0003.safetensors          weights and buffers of layer 3, named as in
#                                       `model.sequential(seed)`
#       optimizer-0003.safetensors      their optimizer's state: `name/key`
#     step-00000300.partial/            being written, or left over
#     set-aside-after-step-00000100/    checkpoints after step 100, before the run went back there
#     set-aside-damaged/                damaged checkpoints whose name was wanted
#     set-aside-replaced/               one whose name another one gets now
#
# A checkpoint is written as `.partial` and renamed, so one that stands under its own name is whole.
# The newest is the one whose manifest says the highest step: names, times of files and `latest` may
# lie.

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

from axrt.config import Config
from axrt.errors import ConfigError, DamagedError, SaveError
from axrt.scheduler.regular_file import read_text

from .durable import sync, write_durably
from .manifest import MANIFEST, FileRecord, Manifest

T = TypeVar("T")

_LATEST, _PARTIAL, _ASIDE = "latest", ".partial", "set-aside-"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A checkpoint by its directory, with its manifest."""

    path: Path  # directory of the checkpoint
    manifest: Manifest | None  # manifest of the checkpoint; None where it cannot be read
    fault: str = ""  # text that says what is wrong with the manifest; "" where nothing is
    is_foreign: bool = False  # True if the checkpoint has a format that this version does not know

    @classmethod
    def at(cls, path: Path) -> "Candidate":
        """The candidate of a directory, whose manifest is read."""
        try:
            return cls(path, Manifest.read(path))
        except ConfigError as error:
            return cls(path, None, str(error), not isinstance(error, DamagedError))

    @property
    def step(self) -> int:
        """The step in the manifest; where that is damaged, the last number in the name, which may
        be wrong."""
        if self.manifest is not None:
            return self.manifest.step
        numbers = re.findall(r"\d+", self.path.name)
        return int(numbers[-1]) if numbers else 0


def is_checkpoint(path: Path) -> bool:
    """The directory is a checkpoint, undamaged or not."""
    return any(any(path.glob(name)) for name in (MANIFEST, "layer-*.safetensors"))


def candidates_in(folder: Path) -> list[Candidate]:
    """All checkpoints that stand under a name of their own in a folder, the newest first.

    Of equal steps the one that `latest` names comes first. A folder that does not exist has none.
    """
    named = named_latest(folder)
    found = (
        [
            Candidate.at(path)
            for path in folder.iterdir()
            if path.suffix != _PARTIAL and is_checkpoint(path)
        ]
        if folder.is_dir()
        else []
    )
    return sorted(
        found, key=lambda one: (one.step, one.path.name == named, one.path.name), reverse=True
    )


def candidates_at(path: Path) -> list[Candidate]:
    """The checkpoints that a path means, the newest first: the path itself, those in it, or those
    of the run whose directory it is.

    Raises:
        ConfigError: there is no such directory.
    """
    if not path.is_dir():
        raise ConfigError(
            f"{path} {'is no directory' if path.exists() else 'does not exist'}; expected a run or "
            "a checkpoint"
        )
    if (path / MANIFEST).exists():
        return [Candidate.at(path)]
    return candidates_in(path) or candidates_in(folder_at(path))


def folder_at(path: Path) -> Path:
    """The folder of checkpoints that a path means: the path itself, or that of the run whose
    directory it is."""
    if (path / "config.toml").exists():
        return path / Config.of_run(path).checkpoint.dir
    return path


def none_in(path: Path) -> ConfigError:
    """The error for a path that means no checkpoint."""
    return ConfigError(
        f"{path} has no whole checkpoint; expected a run that has saved, a checkpoint, or the "
        "directory of some"
    )


def checkpoint_in(path: Path) -> Path:
    """The newest checkpoint that a path means and whose manifest can be read.

    Raises:
        ConfigError: there is none.
    """
    candidates = candidates_at(path)
    for one in candidates:
        if one.manifest is not None:
            return one.path
    raise ConfigError(candidates[0].fault) if candidates else none_in(path)


def newest_undamaged(path: Path, take: Callable[[Path], T], say: Callable[[str], None]) -> T:
    """What `take` makes of the newest checkpoint that a path means, or of the next one where it
    finds damage.

    Args:
        take: function that reads a checkpoint.
        say: function that tells a person what was left out.
    Raises:
        DamagedError: all are damaged.
        ConfigError: there is none.
    """
    faults: list[str] = []
    for one in candidates_at(path):
        try:
            taken = take(one.path)
        except DamagedError as error:
            faults.append(str(error))
            continue
        if faults:
            say(f"damaged, and not taken: {'; '.join(faults)}. Taken is {one.path}")
        return taken
    raise DamagedError("; ".join(faults)) if faults else none_in(path)


# Manifests tell the newest checkpoint. A kill, a copy or a flipped bit makes `latest` wrong.
def named_latest(folder: Path) -> str | None:
    """The name in the file `latest`; None where it cannot be read."""
    try:
        return read_text(folder / _LATEST, errors="surrogateescape").strip()
    except (OSError, ValueError):
        return None


def under_way(checkpoint: Path) -> Path:
    """The directory that a checkpoint is written to before it has its own name."""
    return checkpoint.with_name(checkpoint.name + _PARTIAL)


def check_name(checkpoint: Path, step: int) -> None:
    """Check that a checkpoint may have that name.

    Raises:
        ConfigError: the name means something else in a folder of checkpoints.
    """
    if (
        checkpoint.name == _LATEST
        or checkpoint.suffix == _PARTIAL
        or checkpoint.name.startswith((_ASIDE, "."))
    ):
        raise ConfigError(
            f"a checkpoint cannot be called {checkpoint.name!r}; expected another name, such as "
            f"step-{step:08}"
        )


def check_writable(folder: Path) -> None:
    """Make a directory where there is none, and check that a file can be written to it.

    Raises:
        ConfigError: it cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # A name that nobody knows before: behind one that is known another user may have put a
        # link.
        probe, name = tempfile.mkstemp(prefix=".writable-", dir=folder)
        os.close(probe)
        os.unlink(name)
    except OSError as error:
        raise ConfigError(
            f"{folder}: {error.strerror}; expected a directory that checkpoints can be written to "
            "(checkpoint.dir)"
        ) from None


def begin(checkpoint: Path) -> None:
    """Make the directory that a checkpoint is written to.

    Raises:
        SaveError: it cannot be made.
    """
    try:
        under_way(checkpoint).mkdir(exist_ok=True)
    except OSError as error:
        raise SaveError(f"{checkpoint}: {error.strerror}") from None


def give_up(checkpoint: Path) -> None:
    """Remove the files of a checkpoint that will not be whole: a full disk needs the room."""
    shutil.rmtree(under_way(checkpoint), ignore_errors=True)


def make_whole(checkpoint: Path, manifest: Manifest, files: Mapping[str, FileRecord]) -> None:
    """Make a written checkpoint whole, which has no name of its own yet.

    Files that are not listed are removed. Then comes the manifest.

    Args:
        files: record of each file that was written, by name.
    Raises:
        SaveError: a file is missing, or nothing can be written.
    """
    directory = under_way(checkpoint)
    try:
        there = {path.name for path in directory.iterdir()}
        if missing := sorted(files.keys() - there):
            raise SaveError(
                f"{directory / missing[0]} was written by another rank and is not here; expected a "
                "directory that all ranks share"
            )
        for left_over in there - files.keys():
            (directory / left_over).unlink()
        replace(manifest, files={name: asdict(files[name]) for name in sorted(files)}).write(
            directory
        )
    except OSError as error:
        raise SaveError(f"{error.filename or checkpoint}: {error.strerror}") from None


# A checkpoint that replaces another one is whole before it gets the name, and the other one is
# moved, not removed, until then. Two names cannot be swapped at once, so a kill may leave the older
# one under `set-aside-replaced`.
def publish(checkpoint: Path) -> None:
    """Give a whole checkpoint its name, then let `latest` name it; each is on disk before the next.

    Another one that has the name is removed then. It lies in `set-aside-replaced` meanwhile, where
    a kill leaves it.

    Raises:
        SaveError: the name cannot be given; the one that has it stands.
    """
    aside = checkpoint.with_name(f"{_ASIDE}replaced")
    former = aside / checkpoint.name if checkpoint.exists() else None
    try:
        if former:
            shutil.rmtree(former, ignore_errors=True)  # what an earlier kill has left
            aside.mkdir(exist_ok=True)
            checkpoint.rename(former)
        try:
            under_way(checkpoint).rename(checkpoint)
        except OSError:
            if former:
                former.rename(checkpoint)
            raise
        sync(checkpoint.parent)
    except OSError as error:
        raise SaveError(f"{error.filename or checkpoint}: {error.strerror}") from None
    name_latest(checkpoint)
    if former:
        shutil.rmtree(former, ignore_errors=True)
        with suppress(OSError):  # others are there
            aside.rmdir()


def name_latest(checkpoint: Path) -> None:
    """Let `latest` name a checkpoint.

    A file that cannot be written stays as it is: it is for people, and decides nothing.
    """
    with suppress(OSError):
        if named_latest(checkpoint.parent) != checkpoint.name:
            write_durably(checkpoint.with_name(_LATEST), os.fsencode(f"{checkpoint.name}\n"))


def after(folder: Path, step: int) -> list[Path]:
    """The checkpoints of a folder whose step is later than `step`, the newest first; of damaged
    ones the name counts."""
    return [one.path for one in candidates_in(folder) if one.step > step]


def home_of(checkpoint: Path) -> Path:
    """The folder of the run that a checkpoint belongs to, or belonged to before it was set aside,
    with all links resolved."""
    folder = checkpoint.parent.resolve()
    return folder.parent if folder.name.startswith(_ASIDE) else folder


def set_aside(folder: Path, why: str, paths: Sequence[Path]) -> str:
    """Move checkpoints to a directory of their own.

    Returns:
        A text for people that says what was moved where.
    Raises:
        SaveError: they cannot be moved.
    """
    aside = next(path for path in _numbered(folder / f"{_ASIDE}{why}") if not path.exists())
    try:
        aside.mkdir()
        for path in paths:
            path.rename(aside / path.name)
        sync(aside)
        sync(folder)
    except OSError as error:
        raise SaveError(f"{error.filename or aside}: {error.strerror}") from None
    return f"set aside: {', '.join(path.name for path in paths)} now in {aside}"


def _numbered(path: Path) -> Iterator[Path]:
    yield path
    number = 2
    while True:
        yield path.with_name(f"{path.name}-{number}")
        number += 1


def all_set_aside(folder: Path) -> list[Path]:
    """The directories of checkpoints that were set aside, by name."""
    return sorted(folder.glob(f"{_ASIDE}*"))


def all_partial(folder: Path) -> list[Path]:
    """The directories of checkpoints that are being written, or were left over, by name."""
    return sorted(folder.glob(f"*{_PARTIAL}"))


def prune(folder: Path, keep: int, just_saved: Path) -> None:
    """Remove old checkpoints of a run, and the remains of broken ones.

    Args:
        folder: folder of checkpoints; only those named `step-...` are removed.
        keep: number of newest checkpoints that stay; 0 keeps all.
    Raises:
        OSError: something cannot be removed.
    """
    whole = (
        [one.path for one in candidates_in(folder) if one.path.name.startswith("step-")]
        if keep
        else []
    )
    for old in whole[keep:]:
        if old.name != just_saved.name:
            old.rename(under_way(old))  # a half removed checkpoint must not look whole
    for broken in folder.glob(f"step-*{_PARTIAL}"):
        shutil.rmtree(broken)
