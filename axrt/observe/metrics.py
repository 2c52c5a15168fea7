"""The files of a run: its configuration as it was resolved, and its metrics, one JSON object a line."""

import json
import time
from pathlib import Path
from typing import Any

import tomli_w

from axrt.config import Config
from axrt.errors import DataError


class RunFiles:
    """A directory with `config.toml` and `metrics.jsonl`.

    Args:
        config: `run.out` names the directory. Where it exists, the first free number is added, unless the run goes on from itself.
    """

    def __init__(self, config: Config) -> None:
        wanted = Path(config.run.out)
        self.directory = wanted if config.checkpoint.resume == "auto" and wanted.is_dir() else _new_directory(wanted)
        resolved = config.as_dict()
        resolved["run"]["out"] = str(self.directory)
        self.write("config.toml", tomli_w.dumps(resolved))
        self._began = time.monotonic()

    def record(self, **values: Any) -> None:
        """Append one line, with the seconds since the run began; on disk at once."""
        self._write("metrics.jsonl", "a", json.dumps({**values, "time_s": round(time.monotonic() - self._began, 3)}) + "\n")

    def write(self, name: str, text: str) -> None:
        """A file of that name in the directory."""
        self._write(name, "w", text)

    def _write(self, name: str, mode: str, text: str) -> None:
        path = self.directory / name
        try:
            with path.open(mode, encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}; expected a place where the files of a run can be written (run.out)") from None


def _new_directory(wanted: Path) -> Path:
    number, directory = 1, wanted
    while True:
        try:
            directory.mkdir(parents=True)
            return directory
        except FileExistsError:
            number += 1
            directory = wanted.with_name(f"{wanted.name}-{number}")
        except OSError as error:
            raise DataError(f"run.out = {str(wanted)!r}: {error.strerror}; expected a place where a directory can be made") from None
