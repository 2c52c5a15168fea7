"""The file in a folder of checkpoints that names the run whose copies are in memory."""

# What is in a host's memory may be of another run, another job of this one, or of before the run
# went back. The name, the mark and the word void tell these apart, and the file is where the run
# is: who has no access to the folder of checkpoints takes nothing from memory either.

import json
import re
from pathlib import Path
from typing import NamedTuple, Self

from axrt.scheduler.regular_file import MALFORMED, json_of, read_text

from .durable import write_durably

NAME = ".memory"


class MemoryRun(NamedTuple):
    """What the file in the folder of checkpoints says."""

    run: str  # drawn name of the run
    mark: str  # drawn mark of the job whose copies count
    step: int = 0  # newest step of which all parts were on two hosts
    is_void: bool = False  # the run has gone back to an older checkpoint since

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """What it says; None where it cannot be read."""
        try:
            said = json_of(read_text(folder / NAME))
            run, mark = str(said["run"]), str(said["mark"])
            found = cls(run, mark, int(said["step"]), bool(said["is_void"]))
        except (OSError, *MALFORMED):
            return None
        are_drawn = re.fullmatch("[0-9a-f]{12} [0-9a-f]{8}", f"{found.run} {found.mark}")
        return found if are_drawn else None

    def write(self, folder: Path) -> None:
        """Write it, for this user alone: others could make a directory of that name first.

        Raises:
            OSError: it cannot be written.
        """
        write_durably(folder / NAME, json.dumps(self._asdict()).encode(), 0o600)
