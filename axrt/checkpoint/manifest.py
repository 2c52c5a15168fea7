"""What a checkpoint is: a directory that says what it holds, appears when it is whole, and is named by a file beside it.

    checkpoints/
      latest                        the name of the newest whole one
      step-00000260/
        manifest.json               step, data position, configuration, versions, the user's extra
        layer-0003.safetensors      weights and buffers of layer 3, by the names of `model.sequential(seed)`
        optimizer-0003.safetensors  their optimizer's state: `name/key`

It is written as `step-00000260.partial` and renamed, so that what stands under its own name is whole. Nothing in it is code.
"""

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from axrt.errors import ConfigError

FORMAT = 1
_MANIFEST, _LATEST, _PARTIAL = "manifest.json", "latest", ".partial"


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint says of itself.

    Args:
        step: how many are done.
        samples: how many of the data are used up, over all replicas.
        seed: of the run.
        lr: learning rate of the last step; for people, since it follows from the step.
        layers: the class of each, in order.
        config: every section with every key.
        versions: of Python, torch and axrt.
        extra: the user's.
    """

    step: int
    samples: int
    seed: int
    lr: float | None
    layers: list[str]
    config: dict[str, dict[str, Any]]
    versions: dict[str, str]
    extra: dict[str, Any]

    @classmethod
    def read(cls, checkpoint: Path) -> Self:
        """That of a whole checkpoint.

        Raises:
            ConfigError: there is none, or one of a form that this version does not know.
        """
        path = checkpoint / _MANIFEST
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}; expected a checkpoint, or a directory with a file named {_LATEST}") from None
        except ValueError as error:
            raise ConfigError(f"{path} is not JSON: {error}") from None
        if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
            raise ConfigError(f"{path} is of another format; expected format {FORMAT}, which axrt of this version writes")
        return cls(**found)

    def write(self, directory: Path) -> None:
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=1, allow_nan=False)
        write_durably(directory / _MANIFEST, text.encode())


def checkpoint_in(path: Path) -> Path:
    """The checkpoint that a path means: itself, the latest in it, or the latest in its `checkpoints`.

    Raises:
        ConfigError: there is no whole one.
    """
    for folder in (path, path / "checkpoints"):
        if (folder / _MANIFEST).exists():
            return folder
        newest = latest(folder)
        if newest is not None:
            return newest
    raise ConfigError(f"{path} has no whole checkpoint; expected one, a directory with a file named {_LATEST}, or a run that has saved")


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint of a folder, None where there is none."""
    try:
        newest = folder / (folder / _LATEST).read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return newest if (newest / _MANIFEST).exists() else None


def partial(checkpoint: Path) -> Path:
    """Where it is while it is written."""
    return checkpoint.with_name(checkpoint.name + _PARTIAL)


def publish(checkpoint: Path, manifest: Manifest, files: set[str]) -> None:
    """Make what has been written whole: exactly these files, the manifest, then its name, then `latest`.

    Raises:
        ConfigError: a file is not there.
    """
    directory = partial(checkpoint)
    there = {path.name for path in directory.iterdir()}
    if missing := sorted(files - there):
        raise ConfigError(
            f"{directory / missing[0]} was written by another rank and is not here; expected a directory that all ranks share"
        )
    for left_over in there - files:
        (directory / left_over).unlink()
    manifest.write(directory)
    _sync(directory)
    directory.rename(checkpoint)
    write_durably(checkpoint.with_name(_LATEST), f"{checkpoint.name}\n".encode())
    _sync(checkpoint.parent)


def prune(folder: Path, keep: int) -> None:
    """Remove all but the last `keep` checkpoints of a run (0: none); the latest always stays."""
    whole = sorted(path for path in folder.glob("step-*") if path.suffix != _PARTIAL and (path / _MANIFEST).exists())
    for old in whole[:-keep] if keep else ():
        if old != latest(folder):
            shutil.rmtree(old)


def write_durably(path: Path, data: bytes) -> None:
    """A file that is there as a whole or not at all, whatever ends the process or the machine."""
    beside = path.with_name(path.name + ".new")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
