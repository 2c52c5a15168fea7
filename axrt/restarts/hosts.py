"""The hosts that a job may run on, and those that it does: a host that has failed twice is left out
while there are others."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from axrt.errors import ConfigError
from axrt.scheduler.regular_file import read_text

from .history import Start

_FAILED_AT_MOST = 2
_LINE = re.compile(r"([\w.\-]+)(?::(\d+)|(?:\s+(?:slots|max_slots|num)\s*=\s*(\d+)).*)?")


class Host(NamedTuple):
    """A machine."""

    name: str  # name that the launcher knows
    slots: int  # number of ranks that it may run


def read_hosts(file: Path) -> list[Host]:
    """The hosts of a host file, a line each: `name`, `name:SLOTS` or `name slots=SLOTS`. What
    follows a # is left out.

    Raises:
        ConfigError: the file cannot be read, or has no host.
    """
    try:
        lines = read_text(file).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        what = error.strerror if isinstance(error, OSError) else "no text"
        raise ConfigError(f"--hosts {file}: {what}; expected a file with a host a line") from None
    found = []
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        match = _LINE.fullmatch(text)
        if text and not match:
            raise ConfigError(
                f"{file}, line {number}: {text!r}; expected a host as 'name', 'name:SLOTS' or "
                "'name slots=SLOTS'"
            )
        if match:
            found.append(Host(match[1], int(match[2] or match[3] or 1)))
            if not found[-1].slots:
                raise ConfigError(f"{file}, line {number}: {text!r} has no slots; expected some")
    if not found:
        raise ConfigError(f"--hosts {file} names no host; expected one a line")
    twice = [name for name, count in Counter(host.name for host in found).items() if count > 1]
    if twice:
        raise ConfigError(f"--hosts {file} names {twice[0]} twice; expected one line, with slots")
    return found


def host_of(rank: int, hosts: Sequence[Host]) -> str:
    """The host of a rank, as launchers fill them: one after the other. "" where there is none."""
    slots = [host.name for host in hosts for _ in range(host.slots)]
    return slots[rank] if rank < len(slots) else ""


def left_out(starts: Sequence[Start]) -> set[str]:
    """The hosts that have failed twice: on which a rank has died."""
    counts = Counter(host for start in starts for host in set(start.lost))
    return {host for host, count in counts.items() if count >= _FAILED_AT_MOST}


def placed(hosts: Sequence[Host], ranks: int, out: set[str], spares: int = 0) -> list[Host]:
    """The hosts that a start takes, with the slots that it needs of each.

    Returns:
        Hosts with so many slots in all; fewer slots where there are no more.
    """
    good = [host for host in hosts if host.name not in out]
    taken: list[Host] = []
    for host in good[: max(0, len(hosts) - spares)]:
        missing = ranks - sum(one.slots for one in taken)
        if missing > 0:
            taken.append(host._replace(slots=min(host.slots, missing)))
    return taken
