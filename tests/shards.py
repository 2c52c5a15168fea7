"""Cuts a run of the tests into pieces that take about as long as each other:
`scripts/test --full --shard 2/6`.

A file stays whole, with the jobs and references that its tests share.
"""

import heapq
from collections.abc import Mapping

# Seconds of a core that a case takes on the average, by the start of its file's path; the first
# that fits counts.
SECONDS_A_CASE = {
    "tests/mpi/": 5.0,
    "tests/gpu/": 10.0,
    "tests/device/": 4.0,
    "tests/slurm/": 20.0,
    "tests/attacks/": 20.0,
    "tests/network/": 15.0,
    "tests/models/test_alexnet": 10.0,
    "tests/scheduler/test_plan": 4.0,
    "tests/engine/test_default_plan": 2.5,
    "tests/engine/test_groups": 2.0,
    "tests/engine/test_zero": 1.4,
    "tests/checkpoint/test_in_memory": 1.3,
    "tests/cli/": 0.7,
    "tests/": 0.3,
}


def seconds_of(file: str, cases: int) -> float:
    """What a file takes, about.

    Args:
        file: path of the file from the root of the project.
        cases: number of its cases.
    """
    starts = (start for start in SECONDS_A_CASE if file.startswith(start))
    return cases * SECONDS_A_CASE[next(starts)]


def shards_of(cases: Mapping[str, int], shards: int) -> dict[str, int]:
    """The piece that each file goes into, 1 to `shards`: the longest file first, each into the
    piece that takes least so far.

    Args:
        cases: number of cases of each file, by path.
        shards: number of pieces, at least 1.
    """
    taken = [(0.0, shard) for shard in range(1, shards + 1)]
    longest_first = sorted(cases, key=lambda file: (-seconds_of(file, cases[file]), file))
    found = {}
    for file in longest_first:
        seconds, shard = taken[0]
        found[file] = shard
        heapq.heapreplace(taken, (seconds + seconds_of(file, cases[file]), shard))
    return found


def read_shard(text: str) -> tuple[int, int]:
    """A piece and the number of pieces, from "2/6".

    Raises:
        ValueError: the text is no such pair.
    """
    shard, slash, shards = text.partition("/")
    is_pair = slash == "/" and shard.isdecimal() and shards.isdecimal()
    if not is_pair or not 1 <= int(shard) <= int(shards):
        raise ValueError(f"--shard {text}; expected a piece and the number of pieces, as in 2/6")
    return int(shard), int(shards)
