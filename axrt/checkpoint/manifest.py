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
import math
import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any, Self

import torch

from axrt.config import Config
from axrt.errors import ConfigError, DataError

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
    def of(cls, step: int, samples: int, lr: float, layers: list[str], config: Config, extra: Mapping[str, Any]) -> Self:
        """That of a run as it stands; `ConfigError` where `extra` is not JSON."""
        try:
            own = json.loads(json.dumps(dict(extra), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"extra of a checkpoint: {error}; expected what JSON can hold") from None
        versions = {"python": platform.python_version(), "torch": str(torch.__version__), "axrt": metadata.version("axrt")}
        return cls(step, samples, config.run.seed, lr if math.isfinite(lr) else None, layers, config.as_dict(), versions, own)

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
            raise ConfigError(f"{path}: {error.strerror}; expected that of a whole checkpoint") from None
        except ValueError as error:
            raise ConfigError(f"{path} is not JSON: {error}") from None
        if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
            raise ConfigError(f"{path} is of another format; expected format {FORMAT}, which axrt of this version writes")
        if missing := {item.name for item in fields(cls)} - found.keys():
            raise ConfigError(f"{path} has no {', '.join(sorted(missing))}; expected the manifest of a whole checkpoint")
        return cls(**{item.name: found[item.name] for item in fields(cls)})

    def write(self, directory: Path) -> None:
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=1, allow_nan=False)
        write_durably(directory / _MANIFEST, text.encode())


def checkpoint_in(path: Path) -> Path:
    """The checkpoint that a path means: itself, the latest in it, or the latest of the run whose directory it is.

    Raises:
        ConfigError: there is no whole one.
    """
    if not path.is_dir():
        raise ConfigError(f"{path} {'is no directory' if path.exists() else 'does not exist'}; expected a run or a checkpoint")
    if (path / _MANIFEST).exists():
        return path
    of_run = [path / Config.read(path / "config.toml").checkpoint.dir] if (path / "config.toml").exists() else []
    for folder in (path, *of_run):
        newest = latest(folder)
        if newest is not None:
            return newest
    raise ConfigError(f"{path} has no whole checkpoint; expected a run that has saved, a checkpoint, or the directory of some")


def latest(folder: Path) -> Path | None:
    """The whole checkpoint that `latest` names, or else the newest whole one there is; None where there is none."""
    try:
        named = folder / (folder / _LATEST).read_text(encoding="utf-8").strip()
    except OSError:
        named = folder
    if (named / _MANIFEST).exists():
        return named
    whole = _whole_in(folder)
    return max(whole, key=lambda path: (path / _MANIFEST).stat().st_mtime_ns, default=None)


def partial(checkpoint: Path) -> Path:
    """Where it is while it is written."""
    return checkpoint.with_name(checkpoint.name + _PARTIAL)


def begin(checkpoint: Path, manifest: Manifest) -> None:
    """Make the place to write it to.

    Args:
        checkpoint: its name.
        manifest: that it will have; made before anything is written, so that what cannot be said is found now.
    Raises:
        ConfigError: the name is taken, or nothing can be made there.
    """
    if checkpoint.name == _LATEST or checkpoint.suffix == _PARTIAL:
        raise ConfigError(f"a checkpoint cannot be called {checkpoint.name!r}; expected another name, such as step-{manifest.step:08}")
    if checkpoint.exists():
        raise ConfigError(f"{checkpoint} exists; expected the name of a new checkpoint")
    check_writable(checkpoint.parent)
    partial(checkpoint).mkdir(exist_ok=True)


def check_writable(folder: Path) -> None:
    """Make the directory, and raise `ConfigError` where no file can be written to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}; expected a directory that checkpoints can be written to (checkpoint.dir)") from None


def publish(checkpoint: Path, manifest: Manifest, files: set[str]) -> None:
    """Make what has been written whole: exactly these files, the manifest, then its name, then `latest`; each on disk before the next.

    Raises:
        DataError: a file is not there.
    """
    directory = partial(checkpoint)
    there = {path.name for path in directory.iterdir()}
    if missing := sorted(files - there):
        raise DataError(f"{directory / missing[0]} was written by another rank and is not here; expected a directory that all ranks share")
    for left_over in there - files:
        (directory / left_over).unlink()
    manifest.write(directory)
    _sync(directory)
    directory.rename(checkpoint)
    _sync(checkpoint.parent)
    name_latest(checkpoint)


def name_latest(checkpoint: Path) -> None:
    """Let `latest` name a whole checkpoint."""
    write_durably(checkpoint.with_name(_LATEST), f"{checkpoint.name}\n".encode())
    _sync(checkpoint.parent)


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints of a run (0: none), and what is left of broken ones; the latest always stays."""
    whole = sorted(path for path in _whole_in(folder) if path.name.startswith("step-"))
    for old in whole[:-keep] if keep else ():
        if old != latest(folder):
            old.rename(partial(old))  # what is half removed must not look whole
    for broken in folder.glob(f"step-*{_PARTIAL}"):
        shutil.rmtree(broken)


def _whole_in(folder: Path) -> list[Path]:
    return [path.parent for path in folder.glob(f"*/{_MANIFEST}") if path.parent.suffix != _PARTIAL]


def write_durably(path: Path, data: bytes) -> None:
    """A file that is there as a whole or not at all, whatever ends the process or the machine; `DataError` where it cannot be written."""
    beside = path.with_name(path.name + ".new")
    try:
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; the checkpoint is not whole, the one before it stands") from None


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
