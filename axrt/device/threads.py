"""The number of threads that a rank computes with: its share of the cores that the launcher
gave."""

# Torch takes all cores that a process may use. That is right for ranks that are bound to cores of
# their own; ranks of a node that may all use the same cores would wait for each other.

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from math import floor

import psutil

from axrt.scheduler.plural import plural

_SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def usable_cores() -> list[int]:
    """The numbers of the cores that this process may use."""
    return (
        psutil.Process().cpu_affinity()
        if sys.platform == "linux"
        else list(range(psutil.cpu_count() or 1))
    )


def share_of(node_rank: int, usable: Sequence[Sequence[int]]) -> int:
    """The number of threads of one rank of a node, at least 1.

    A core that several ranks may use counts in equal parts.

    Args:
        node_rank: index of the rank among the ranks of its node.
        usable: cores that each rank of the node may use, by number.
    """
    users = Counter(core for cores in usable for core in cores)
    return max(1, floor(sum(1 / users[core] for core in usable[node_rank]) + 1e-9))


def threads_of(
    threads: int, node_rank: int, usable: Sequence[Sequence[int]], environment: Mapping[str, str]
) -> int:
    """The number of threads that a rank computes with: at most its share.

    Args:
        node_rank: index of the rank among the ranks of its node.
        usable: cores that each rank of the node may use, by number.
        environment: variables of this process; `OMP_NUM_THREADS` or `MKL_NUM_THREADS` leaves
            torch's number as it is.
    """
    if any(name in environment for name in _SETTINGS):
        return threads
    return min(threads, share_of(node_rank, usable))


def crowding(places: Sequence[tuple[str, Sequence[int]]]) -> str:
    """A line about a host whose ranks share cores; "" where there is none.

    Args:
        places: host of each rank, and the cores that it may use, by number.
    """
    for host in dict.fromkeys(host for host, _ in places):
        of_ranks = [cores for name, cores in places if name == host]
        cores = len(set().union(*of_ranks))
        if len(of_ranks) > cores:
            which = f" on {host}" if len({name for name, _ in places}) > 1 else ""
            return (
                f"{plural(len(of_ranks), 'rank')} share {plural(cores, 'core')}{which}: they take "
                "turns, and are slower than with a core each"
            )
    return ""
