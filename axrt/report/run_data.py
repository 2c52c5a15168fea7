"""What the files of a run say of it."""

import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from axrt.errors import ConfigError
from axrt.observe.metrics import MEMORY, METRICS, is_run
from axrt.observe.origin import STARTS
from axrt.scheduler.comparison import Run, compared
from axrt.scheduler.timeline import Timeline

_OF_A_START = {"began", "step", "command", "hosts", "commit", "versions"}
_OF_A_LAUNCH = {"began", "step", "gained", "took_s", "code", "lost"}


@dataclass(frozen=True, slots=True)
class Traced:
    """The timeline of a run.

    Args:
        measured: its tasks.
        simulated: what the simulator makes of the same schedule with fitted costs.
        figures: measured and predicted figures and fitted costs, see `compared`.
        fault: why there is no simulation; "" where there is one.
    """

    measured: Timeline
    simulated: Timeline | None
    figures: dict[str, Any]
    fault: str = ""


@dataclass(frozen=True, slots=True)
class RunData:
    """What there is of a run.

    Args:
        path: its directory.
        config: sections of keys.
        lines: lines of metrics, in order; of steps that ran again the last.
        starts: its starts.
        launches: starts by `axrt launch`.
        memory: predicted and measured bytes, see `Record.predicted`; {} where nobody says.
        traced: its timeline; None where none was asked for.
    """

    path: Path
    config: dict[str, dict[str, Any]]
    lines: list[dict[str, Any]]
    starts: list[dict[str, Any]]
    launches: list[dict[str, Any]]
    memory: dict[str, Any]
    traced: Traced | None

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the directory of a run.

        Raises:
            ConfigError: it is none.
        """
        if not is_run(path):
            raise ConfigError(f"{path} has no config.toml; expected the directory of a run")
        try:
            config = tomllib.loads((path / "config.toml").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path / 'config.toml'}: {error}; expected that of a run") from None
        return cls(
            path,
            config,
            [one for one in _json_lines(path / METRICS) if isinstance(one.get("step"), int)],
            [one for one in _json_lines(path / STARTS) if one.keys() >= _OF_A_START],
            [one for one in _json_lines(path / "launches.jsonl") if one.keys() >= _OF_A_LAUNCH],
            next(_json_lines(path / MEMORY), {}),
            _traced(path),
        )

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """The steps that have a value, and the values; of a step that ran again the last."""
        found = {line["step"]: line[key] for line in self.lines if line.get(key) is not None}
        return sorted(found), [found[step] for step in sorted(found)]


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file; one that a killed process has not finished is left out."""
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            yield found


def _traced(path: Path) -> Traced | None:
    file = path / "timeline.json"
    if not file.is_file():
        return None
    try:
        run = Run.read(path)
    except ValueError as error:
        return _without_simulation(file, str(error))
    try:
        figures, _, line = compared(run)
    except ValueError as error:
        return Traced(run.line, None, {}, str(error))
    return Traced(run.line, line, figures)


def _without_simulation(file: Path, fault: str) -> Traced | None:
    try:
        return Traced(Timeline.from_json(file.read_text(encoding="utf-8")), None, {}, fault)
    except (OSError, ValueError):
        return None
