"""How many threads a rank computes with: its share of the cores that the launcher gave.

Torch takes all cores that a process may use. Ranks that are bound to cores of their own are right
with that; ranks of a node that may all use the same cores would wait for each other.
"""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from math import floor

import psutil

_SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def usable_cores() -> list[int]:
    """The numbers of the cores that this process may use."""
    return (
        psutil.Process().cpu_affinity()
        if sys.platform == "linux"
        else list(range(psutil.cpu_count() or 1))
    )


def share_of(node_rank: int, usable: Sequence[Sequence[int]]) -> int:
    """The threads of one rank of a node: a core that several may use counts in parts, and every
    rank has one thread.

    Args:
        node_rank: its place among the ranks of its node.
        usable: the cores of each of them.
    """
    users = Counter(core for cores in usable for core in cores)
    return max(1, floor(sum(1 / users[core] for core in usable[node_rank]) + 1e-9))


def threads_of(
    threads: int, node_rank: int, usable: Sequence[Sequence[int]], environment: Mapping[str, str]
) -> int:
    """What a rank is to compute with where torch would take so many: at most its share, unless the
    environment says how many."""
    if any(name in environment for name in _SETTINGS):
        return threads
    return min(threads, share_of(node_rank, usable))
