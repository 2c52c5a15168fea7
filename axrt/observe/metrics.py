"""The files of a run: its resolved configuration, and its metrics, one JSON object a line."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w

from axrt.checkpoint.durable import sync, write_durably
from axrt.checkpoint.lock import DirectoryLock
from axrt.checkpoint.private import check_own_link
from axrt.config import AUTO, Config
from axrt.data.prepared import KEPT, Prepared, tokenizer_name
from axrt.data.tokenizer import MOST_BYTES
from axrt.errors import ConfigError, SaveError
from axrt.scheduler.plural import plural
from axrt.scheduler.regular_file import read_bytes

from .json_lines import (
    Fits,
    append,
    are_numbers,
    cut_off_half_a_line,
    is_count,
    is_number,
    is_seconds,
    is_text,
    last_objects,
    or_none,
)

METRICS, TOKENIZER, MEMORY = "metrics.jsonl", "tokenizer.json", "memory.json"
STARTS = "starts.jsonl"
METRICS_LINE: Fits = {  # what may stand in one
    "step": is_count,
    "time_s": or_none(is_seconds),
    **dict.fromkeys(("loss", "val_loss", "lr", "grad_norm", "mfu"), or_none(is_number)),
    **dict.fromkeys(("tokens_per_s", "tokens_per_s_device"), or_none(is_number)),
    **dict.fromkeys(("idle", "memory_bytes"), or_none(are_numbers)),
    "resumed_from": or_none(is_text),
}


class RunFiles:
    """The directory of a run, which no other run writes to meanwhile.

    A run that goes on from itself, or goes back to a checkpoint of its own, stays in its directory;
    nothing is written before `begin`.

    Args:
        config: settings of the run. `run.out` names the directory; where it exists, the first free
            number is added, unless the run stays in it.
    Attributes:
        directory: directory of the run; a number may be added by `begin`.
    Raises:
        ConfigError: another run writes there, or no directory can have that name.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self.directory = Path(config.run.out)
        self._residencies = residencies(config, self.directory)
        self._lock: DirectoryLock | None = None
        is_named = self.directory.name.strip() not in ("", "..")
        if self._residencies and (is_named or is_run(self.directory)):
            for path in (self.directory, self.directory / config.checkpoint.dir):
                check_own_link(path)
            self._take()
        elif not is_named:
            raise ConfigError(
                f"run.out = {config.run.out!r}; expected the name of a directory to make, such as "
                "runs/mine"
            )
        self._began = time.monotonic()
        self._unwritten: list[str] = []

    def begin(self) -> None:
        """Make the directory if it is to be a new one, and write the run's configuration to it.

        Raises:
            ConfigError: the directory cannot be made or written to.
        """
        if not self._residencies:
            self.directory = _new_directory(self.directory)
            self._take()
        resolved = self._config.as_dict()
        resolved["run"]["out"] = str(self.directory)
        if self._residencies:  # a run that has gone back once goes on from there the next time
            resolved["checkpoint"]["resume"] = AUTO
        try:
            content = tomli_w.dumps(resolved).encode(errors="surrogateescape")
            write_durably(self.directory / "config.toml", content)
            self._keep_tokenizer()
            for name in (METRICS, STARTS):
                cut_off_half_a_line(self.directory / name)
            self._began = time.monotonic() - _seconds_so_far(self.directory / METRICS)
        except OSError as error:
            raise unwritable(self.directory, error) from None

    def _keep_tokenizer(self) -> None:
        """Have a copy of the tokenizer's file, and of what is told of the tokens, so that the model
        can be talked to anywhere."""
        if self._config.data.is_of_tokens:
            told = Path(self._config.data.sources[0]).with_suffix(".json")
            if Prepared.beside(Path(self._config.data.sources[0])):
                write_durably(self.directory / KEPT, read_bytes(told))
        name, path = tokenizer_name(self._config.data), self.directory / TOKENIZER
        if Path(name).is_file() and not path.exists():
            write_durably(path, read_bytes(name, MOST_BYTES))

    def let_go(self) -> None:
        """Let another rank, or this one anew, write to the directory."""
        if self._lock is not None:
            self._lock.release()

    def _take(self) -> None:
        try:
            self._lock = DirectoryLock(self.directory)
        except OSError as error:
            raise unwritable(self.directory, error) from None

    def record(self, **values: Any) -> None:
        """Append one line of metrics, with the seconds that the run has been under way, all its
        starts together; it is written at once.

        Raises:
            SaveError: the line cannot be written now. It is kept, and written with the next one.
        """
        self._unwritten.append(
            json.dumps({**values, "time_s": round(time.monotonic() - self._began, 3)}) + "\n"
        )
        self.catch_up()

    def catch_up(self) -> None:
        """Write the lines that could not be written before.

        Raises:
            SaveError: they cannot be written now, either.
        """
        if not self._unwritten:
            return
        try:
            append(self.directory / METRICS, "".join(self._unwritten).encode())
        except OSError as error:
            raise SaveError(
                f"{self.directory / METRICS}: {error.strerror}; "
                f"{plural(len(self._unwritten), 'line')} wait to be written"
            ) from None
        self._unwritten.clear()

    def append(self, name: str, text: str) -> None:
        """Append to a file of that name in the directory.

        Raises:
            SaveError: it cannot be written.
        """
        try:
            append(self.directory / name, text.encode())
        except OSError as error:
            raise SaveError(f"{self.directory / name}: {error.strerror}") from None

    def write(self, name: str, content: str | bytes) -> None:
        """Write a file of that name in the directory.

        Raises:
            SaveError: it cannot be written.
        """
        try:
            data = content.encode(errors="replace") if isinstance(content, str) else content
            write_durably(self.directory / name, data)
        except OSError as error:
            raise SaveError(f"{self.directory / name}: {error.strerror}") from None


def unwritable(directory: Path, error: OSError) -> ConfigError:
    """The refusal of a directory for the files of a run."""
    where = error.filename or directory
    return ConfigError(
        f"{where}: {error.strerror}; expected a place where the files of a run can be written "
        "(run.out)"
    )


def kept_in_run(path: Path, name: str) -> Path | None:
    """A file that the run keeps in its directory.

    Args:
        path: directory of the run, its folder of checkpoints, or one of these.
    Returns:
        Its path; None where there is none.
    """
    folders = [folder for folder in (path, *path.absolute().parents[:2]) if is_run(folder)]
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def is_run(directory: Path) -> bool:
    """A directory is that of a run."""
    return (directory / "config.toml").is_file()


def residencies(config: Config, directory: Path) -> bool:
    """The run of this directory goes on there, from its newest checkpoint or from one that is
    named."""
    resume, folder = config.checkpoint.resume, config.checkpoint.dir
    if not directory.is_dir():
        return False
    if config.checkpoint.goes_on:
        return True
    return bool(resume and folder) and Path(resume).resolve().is_relative_to(
        (directory / folder).resolve()
    )


def in_its_directory(file: str | Path, config: Config) -> Config:
    """The configuration with `run.out` set to the directory of the given file, where that is a run
    that goes on: it may have been moved."""
    directory = Path(file).parent
    is_of_run = Path(file).name == "config.toml" and (directory / METRICS).exists()
    if is_of_run and residencies(config, directory):
        return replace(config, run=replace(config.run, out=str(directory)))
    return config


def _seconds_so_far(path: Path) -> float:
    """The time of the last whole line; 0 where there is none."""
    times = (line.get("time_s") for line in last_objects(path, METRICS_LINE))
    return next((float(time_s) for time_s in times if time_s is not None), 0.0)


def _new_directory(wanted: Path) -> Path:
    number, directory = 1, wanted
    while True:
        try:
            directory.mkdir(parents=True)
            sync(directory.parent)
            return directory
        except FileExistsError:
            number += 1
            directory = wanted.with_name(f"{wanted.name}-{number}")
        except OSError as error:
            raise ConfigError(
                f"run.out = {str(wanted)!r}: {error.strerror}; expected a place where a directory "
                "can be made"
            ) from None
