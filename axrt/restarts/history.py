"""The starts of a run's job, one line of JSON each in `launches.jsonl` of its directory."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from axrt.observe.json_lines import (
    Fits,
    append,
    cut_off_half_a_line,
    is_count,
    is_number,
    is_text,
    is_texts,
)
from axrt.scheduler.plural import plural

LAUNCHES = "launches.jsonl"
LAUNCH: Fits = {  # what may stand in a line
    "began": is_text,
    "lost": is_texts,
    "took_s": is_number,
    "step": is_count,
    **dict.fromkeys(("code", "gained"), lambda value: type(value) is int),
}


@dataclass(frozen=True, slots=True)
class Start:
    """A start of the job that has ended."""

    began: str  # time of day in UTC, ISO 8601
    took_s: float  # seconds until the launcher had ended
    ranks: int  # number of ranks
    hosts: tuple[str, ...]  # hosts that they were asked to run on; () where the launcher chose
    settings: tuple[str, ...]  # what this start has set beside the command, as `section.key=value`
    code: int  # exit code of the launcher; the negative number of a signal that has ended it
    said: int | None  # exit code that the first rank to end has left; None where none has
    lost: tuple[str, ...]  # hosts that a rank has died on, as the launcher or a rank says
    step: int  # step of the newest sound checkpoint before; 0 where there was none
    gained: int  # number of steps between that and the newest one after

    def __str__(self) -> str:
        is_other = self.said not in (None, self.code)
        said = f", its ranks with {self.said}" if is_other else ""
        lost = f", lost {', '.join(self.lost)}" if self.lost else ""
        where = f" on {', '.join(self.hosts)}" if self.hosts else ""
        return (
            f"{self.began} {plural(self.ranks, 'rank')}{where} from step {self.step}: "
            f"{plural(self.gained, 'step')} in {self.took_s:.0f} s, ended with "
            f"{self.code}{said}{lost}"
        )


class History:
    """What is kept of the starts of a run.

    Args:
        directory: directory of the run, which need not exist.
    """

    def __init__(self, directory: Path) -> None:
        self._file = directory / LAUNCHES
        self._unwritten: list[Start] = []

    def add(self, start: Start) -> None:
        """Append a start that has ended. It is written as soon as the run has a directory.

        Raises:
            OSError: the file cannot be written.
        """
        self._unwritten.append(start)
        if self._file.parent.is_dir():
            cut_off_half_a_line(self._file)
            lines = "".join(json.dumps(asdict(one)) + "\n" for one in self._unwritten)
            append(self._file, lines.encode())
            self._unwritten = []
