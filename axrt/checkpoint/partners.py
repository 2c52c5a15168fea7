"""Which rank keeps a copy of which rank's state in memory: one of another host."""

# Rank k of a host is kept by rank k of the next host, around a ring. So each host keeps as much as
# it has given, a lost host loses one copy of each part, and two neighbouring hosts have to go at
# once before anything is lost. Gemini (Wang et al., SOSP 2023) calls that ring placement.

import re
import socket
from collections.abc import Sequence

from axrt.config import Run
from axrt.errors import ConfigError
from axrt.scheduler.plural import plural

_HOST = re.compile(r"[\w.-]{1,64}")


def host_name(run: Run, rank: int) -> str:
    """The name of the host of a rank, which is this one's or made up.

    Raises:
        ConfigError: hosts are made up for fewer ranks, or some have no name.
    """
    if not run.host_of:
        return socket.gethostname()
    made_up = [name.strip() for name in run.host_of.split(",")]
    if not all(map(_HOST.fullmatch, made_up)):
        raise ConfigError(
            f"run.host_of = {run.host_of!r}; expected a name for each rank, such as '0,0,1,1' for "
            "four, of letters, digits, points, hyphens and underscores"
        )
    if rank >= len(made_up):
        raise ConfigError(
            f"run.host_of = {run.host_of!r} has {plural(len(made_up), 'host')}, and there is a "
            f"rank {rank}; expected one for each rank, such as '0,0,1,1' for four"
        )
    return f"node-{made_up[rank]}"


def partners_of(hosts: Sequence[str]) -> list[int]:
    """The rank that keeps the copy of each rank: one of the next host, in the order of hosts.

    Args:
        hosts: name of the host of each rank.
    Raises:
        ConfigError: there is one host only.
    """
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    names = list(ranks)
    if len(names) < 2:
        raise ConfigError(
            f"checkpoint.memory_every: all {len(hosts)} ranks are on {names[0]}, so that a copy in "
            "memory would be lost with what it is of; expected ranks on two hosts or more, also by "
            "run.host_of where that names them. Else set checkpoint.memory_every = 0, and "
            "checkpoint.every to save on a disk"
        )
    return [
        _of_next(ranks[names[(names.index(host) + 1) % len(names)]], ranks[host].index(rank))
        for rank, host in enumerate(hosts)
    ]


def _of_next(ranks: Sequence[int], place: int) -> int:
    return ranks[place % len(ranks)]
