"""The configuration: one TOML file, one frozen dataclass for each section.

Values are checked where a section is built, whether it comes from a file, a dict or code, and
before anything is sent: every rank finds the same mistake. Each text says what was found, what was
expected, which key to set.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self, get_type_hints

from axrt.errors import ConfigError

from .checkpoint import Checkpoint
from .data import Data
from .former import with_present_names
from .memory import Memory
from .model import Model
from .optimizer import Optimizer
from .parallel import Parallel
from .precision import Precision
from .reading import apply, built, foreign_code, in_doubt, names_any, parse_file, unknown
from .run import Run
from .schedule import Schedule
from .section import Mistakes, refuse, told
from .together import of_sections

RUN_FILE = "config.toml"  # in the directory of a run


@dataclass(frozen=True, slots=True)
class Config:
    """All sections. Build it from a file, from a dict of the same sections, or in code.

    Raises:
        ConfigError: sections do not go together.
    """

    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    parallel: Parallel = field(default_factory=Parallel)
    schedule: Schedule = field(default_factory=Schedule)
    precision: Precision = field(default_factory=Precision)
    memory: Memory = field(default_factory=Memory)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    run: Run = field(default_factory=Run)

    def __post_init__(self) -> None:
        refuse(of_sections(self))

    @property
    def global_batch(self) -> int:
        """Number of samples of a step, over all replicas."""
        return self.parallel.data * self.schedule.microbatches * self.schedule.microbatch_size

    @property
    def votes(self) -> bool:
        """Optimizer steps wait for the norm of all gradients: to clip them, to hear of an overflow,
        or to hear how far changes of matrices would go together."""
        return self.optimizer.clip > 0 or self.precision.scales or self.optimizer.preconditions

    @property
    def refresh_lag(self) -> int:
        """Steps after which what an optimizer computes anew behind a step is used, where tasks of
        their own do it; 0: nothing is, or within steps."""
        on_host = self.memory.steps_on_host  # beside the device's tasks anyway
        return self.optimizer.lag if self.optimizer.refreshes and not on_host else 0

    @property
    def saves_beside(self) -> bool:
        """Training goes on while a checkpoint is written."""
        how = self.checkpoint.background
        return how == "on" or (how == "auto" and not self.memory.scratch_directory)

    @classmethod
    def read(
        cls, source: "str | Path | Mapping[str, Any] | Config | None", overrides: Sequence[str] = ()
    ) -> Self:
        """Read a configuration.

        Args:
            source: path of a TOML file, a dict of sections, or a Config; None takes all defaults.
            overrides: texts `section.key=value` that are laid over it, in order.
        Raises:
            ConfigError: there is no such file, or it is no TOML. Else one text lists all mistakes:
                unknown sections and keys, each with the nearest name; values that do not fit;
                values that do not go together.
        """
        if isinstance(source, Config):
            tree: dict[str, Any] = source._tree()
        elif isinstance(source, str | Path):
            tree = parse_file(Path(source))
            refuse(foreign_code(Path(source), tree, overrides))
        else:
            tree = {
                section: dict(keys) if isinstance(keys, Mapping) else keys
                for section, keys in (source or {}).items()
            }
        mistakes = [text for override in overrides for text in apply(override, tree)]
        kinds = get_type_hints(cls)
        mistakes += unknown(tree, kinds)
        sections = {name: built(kind, tree.get(name, {}), mistakes) for name, kind in kinds.items()}
        try:
            config = cls(**sections)
        except Mistakes as error:
            mistakes += [
                text for text in error.texts if not names_any(text, in_doubt(mistakes, kinds))
            ]
        if mistakes:
            raise ConfigError(told(mistakes))
        return config

    @classmethod
    def of_run(cls, directory: Path) -> Self:
        """The settings that a run has written to its directory, also by a former version.

        Raises:
            ConfigError: its config.toml cannot be read.
        """
        return cls.read(with_present_names(parse_file(directory / RUN_FILE)))

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Every section with every key, as TOML can write it."""
        return {
            name: {k: list(v) if isinstance(v, tuple) else v for k, v in keys.items()}
            for name, keys in self._tree().items()
        }

    def _tree(self) -> dict[str, dict[str, Any]]:
        """Every section with every key. Values are not copied, as `asdict` would: none changes."""
        sections = ((item.name, getattr(self, item.name)) for item in fields(self))
        return {
            name: {of.name: getattr(one, of.name) for of in fields(one)} for name, one in sections
        }


def described() -> list[str]:
    """Every key with its default and meaning, one line each, under a line for each section."""
    lines = []
    for name, section in get_type_hints(Config).items():
        lines.append(f"[{name}]  {section.__doc__}")
        lines += [
            f"  {item.name} = {item.default!r}".ljust(34) + item.metadata["meaning"]
            for item in fields(section)
        ]
    return lines
