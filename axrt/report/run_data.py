"""What the files of a run say of it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from axrt.errors import ConfigError
from axrt.observe.json_lines import (
    Fits,
    Says,
    are_counts,
    are_numbers,
    is_number,
    is_text,
    is_texts,
    objects_in,
    or_none,
)
from axrt.observe.metrics import MEMORY, METRICS, METRICS_LINE, STARTS, is_run
from axrt.observe.origin import START
from axrt.restarts.history import LAUNCH, LAUNCHES
from axrt.scheduler.regular_file import read_text, toml_of
from axrt.scheduler.simulation.comparison import Run, compared
from axrt.scheduler.simulation.timeline import Timeline

_OF_MEMORY: Fits = {
    "predicted": lambda value: isinstance(value, list) and all(map(_is_prediction, value)),
    "measured": or_none(
        lambda value: (
            isinstance(value, list) and all(is_number(one) or are_numbers(one) for one in value)
        )
    ),
    "owners": or_none(is_text),
    "owned": or_none(lambda value: isinstance(value, list) and all(map(_is_owned, value))),
}


def _is_prediction(value: Any) -> bool:
    """Bytes of a rank, each with its purpose and its tier."""
    return isinstance(value, list) and all(
        isinstance(one, list)
        and len(one) == 3
        and is_text(one[0])
        and is_text(one[1])
        and is_number(one[2])
        for one in value
    )


def _is_owned(value: Any) -> bool:
    """What an owner of a stage steps, see `rows_of`."""
    return (
        isinstance(value, dict)
        and are_counts([value.get("stage"), value.get("owner")])
        and is_number(value.get("share"))
        and is_texts(value.get("matrices"))
    )


@dataclass(frozen=True, slots=True)
class Traced:
    """The timeline of a run."""

    measured: Timeline  # its tasks
    simulated: Timeline | None  # what the simulator makes of the same schedule with fitted costs
    figures: dict[str, Any]  # measured and predicted figures and fitted costs, see `compared`
    fault: str = ""  # why there is no simulation; "" where there is one


@dataclass(frozen=True, slots=True)
class RunData:
    """What there is of a run."""

    path: Path  # its directory
    config: dict[str, dict[str, Any]]  # sections of keys
    lines: list[dict[str, Any]]  # lines of metrics, in order; of steps that ran again the last
    starts: list[dict[str, Any]]  # its starts
    launches: list[dict[str, Any]]  # starts by `axrt launch`
    # predicted and measured bytes, see `Record.predicted`; {} where nobody says
    memory: dict[str, Any]
    traced: Traced | None  # its timeline; None where none was asked for

    @classmethod
    def read(cls, path: Path, says: Says) -> Self:
        """Read the directory of a run.

        Args:
            says: function that is told of what is left out.
        Raises:
            ConfigError: it is none.
        """
        if not is_run(path):
            raise ConfigError(f"{path} has no config.toml; expected the directory of a run")
        try:
            config = toml_of(read_text(path / "config.toml", errors="surrogateescape"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path / 'config.toml'}: {error}; expected that of a run") from None
        return cls(
            path,
            config,
            list(objects_in(path / METRICS, METRICS_LINE, says)),
            list(objects_in(path / STARTS, START, says)),
            list(objects_in(path / LAUNCHES, LAUNCH, says)),
            next(objects_in(path / MEMORY, _OF_MEMORY, says), {}),
            _traced(path),
        )

    @property
    def steps(self) -> object:
        """The number of steps that the run is to do, as its configuration has it."""
        keys = self.config.get("run")
        return keys.get("steps", "?") if isinstance(keys, dict) else "?"

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """The steps that have a value, and the values; of a step that ran again the last."""
        lines = (line for line in self.lines if "resumed_from" not in line)
        found = {line["step"]: line[key] for line in lines if line.get(key) is not None}
        return sorted(found), [found[step] for step in sorted(found)]


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
        return Traced(Timeline.read(file), None, {}, fault)
    except (OSError, ValueError):
        return None
