"""The code with which a process of axrt ends. A batch script decides by it whether to start the job
again.

A launcher may hide the code: srun returns the highest of all ranks, and that is 137 or 143 where it
has killed the others. So the first rank that ends a job also leaves its code in the file that
`AXRT_EXIT_FILE` names, where that is set.
"""

import contextlib
import os
from enum import IntEnum

from axrt.errors import ConfigError, DataError, ModelError, PeerLostError

FILE = "AXRT_EXIT_FILE"


class Exit(IntEnum):
    """The codes; docs/reliability.md and docs/slurm.md carry the same table."""

    DONE = 0  # everything asked for is done
    BAD_INPUT = (
        2  # the configuration, the data or the model cannot work: starting again meets the same
    )
    LOST_PEER = 69  # a rank of the job has died or is frozen: start again
    FAILED = 70  # anything else: read the traceback first
    SAVED = 75  # interrupted, and saved: start again, it goes on (sysexits' EX_TEMPFAIL)
    INTERRUPTED = 130  # interrupted at once, or with nothing to save to


def exit_code_of(error: BaseException) -> Exit:
    """The code with which a process ends that has failed with this error."""
    if isinstance(error, ConfigError | DataError | ModelError):
        return Exit.BAD_INPUT
    if isinstance(error, PeerLostError):
        return Exit.LOST_PEER
    return Exit.INTERRUPTED if isinstance(error, KeyboardInterrupt) else Exit.FAILED


def leave_code(code: Exit) -> None:
    """Write the code to the file that `AXRT_EXIT_FILE` names, unless another rank was first.

    A file that cannot be written is left out.
    """
    path = os.environ.get(FILE)
    if path:
        with contextlib.suppress(OSError), open(path, "x", encoding="utf-8") as file:
            file.write(f"{code:d}\n")
