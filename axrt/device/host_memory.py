"""Memory of the CPU that this process may still take: the machine's, or less by its control
group."""

# A batch system or a container limits a job by a control group (cgroup), of the second version or
# of the first. The files are those of the kernel's documentation, admin-guide/cgroup-v2 and
# cgroup-v1.

from collections.abc import Iterator
from pathlib import Path

import psutil

_MOUNTED, _MINE = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_LIMIT_AND_USE = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def free_on_host(mounted: Path = _MOUNTED, mine: Path = _MINE) -> int:
    """Bytes of the CPU's memory that are free now, for all processes that share them.

    Args:
        mounted: where control groups are.
    """
    return min([int(psutil.virtual_memory().available), *_left(mounted, mine)])


def _left(mounted: Path, mine: Path) -> Iterator[int]:
    """What is left of each limit, of the process's groups and of those around them."""
    try:
        lines = mine.read_text(encoding="ascii").splitlines()
    except OSError:  # no Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            group = mounted / controllers / path.lstrip("/")
            for folder in (group, *group.parents):
                if folder.is_relative_to(mounted / controllers):
                    yield from _left_in(folder)


def _left_in(folder: Path) -> Iterator[int]:
    """What is left of a group's limit, if it has one."""
    for limit, used in _LIMIT_AND_USE:
        try:
            most, now = ((folder / name).read_text(encoding="ascii") for name in (limit, used))
            yield max(0, int(most) - int(now))
        except (OSError, ValueError):  # no such file; "max" is no limit
            continue
