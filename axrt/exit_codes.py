"""With which code a process of axrt ends. A batch script decides by it whether to start the job again."""

from enum import IntEnum

from axrt.errors import ConfigError, DataError, PeerLostError


class Exit(IntEnum):
    """The codes; README and docs/reliability.md carry the same table."""

    DONE = 0  # everything asked for is done
    BAD_INPUT = 2  # the configuration or the data cannot work: starting again meets the same
    LOST_PEER = 69  # a rank of the job has died or is frozen: start again
    FAILED = 70  # anything else: read the traceback first
    SAVED = 75  # interrupted, and saved: start again, it goes on (sysexits' EX_TEMPFAIL)
    INTERRUPTED = 130  # interrupted at once, or with nothing to save to


def exit_code_of(error: BaseException) -> Exit:
    """The code with which a process ends that this error ends."""
    if isinstance(error, ConfigError | DataError):
        return Exit.BAD_INPUT
    if isinstance(error, PeerLostError):
        return Exit.LOST_PEER
    return Exit.INTERRUPTED if isinstance(error, KeyboardInterrupt) else Exit.FAILED
