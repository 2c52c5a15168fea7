"""The full run in pieces: which cases are in which one.

`--shard 2/6` takes the second of six pieces. A file stays whole, with the jobs and runs that its
cases share, unless it alone would take longer than a piece; then neighbours stay together. The
dearest come first, each into the piece that has least so far. So pieces depend on what was
collected, and on nothing else.
"""

from collections.abc import Sequence
from itertools import groupby
from math import ceil

# Seconds of a case on two cores, about, by the first of these that its name begins with.
_SECONDS = (
    ("tests/mpi/test_cases", 3.0),
    ("tests/mpi/test_failures", 3.0),
    ("tests/mpi/", 20.0),
    ("tests/slurm/test_pretrain", 60.0),
    ("tests/gpu/", 8.0),
    ("tests/device/", 4.0),
    ("tests/network/", 60.0),
    ("tests/attacks/", 60.0),
    ("tests/docs/test_tutorial", 60.0),
    ("tests/test_package", 30.0),
    ("tests/engine/", 0.5),
    ("tests/", 0.1),
)


def seconds_of(name: str) -> float:
    """About so long a case takes."""
    return next((seconds for start, seconds in _SECONDS if name.startswith(start)), 0.1)


def read(text: str) -> tuple[int, int]:
    """The number of a piece, from 1, and how many there are, of "2/6".

    Raises:
        ValueError: it is none.
    """
    number, _, of = text.partition("/")
    if not (number.isdigit() and of.isdigit() and 1 <= int(number) <= int(of)):
        raise ValueError(f"--shard {text}; expected a piece of several, such as 2/6")
    return int(number), int(of)


def shards(names: Sequence[str], pieces: int) -> list[set[str]]:
    """The names of cases in each of so many pieces.

    Args:
        names: names of all cases, those of a file one after the other.
        pieces: number of pieces.
    """
    most_s = sum(map(seconds_of, names)) / pieces
    blocks = [block for _, of in groupby(names, _file_of) for block in _cut(list(of), most_s)]
    took_s, found = [0.0] * pieces, [set[str]() for _ in range(pieces)]
    for block in sorted(blocks, key=_seconds, reverse=True):
        least = took_s.index(min(took_s))
        took_s[least] += _seconds(block)
        found[least].update(block)
    return found


def _file_of(name: str) -> str:
    return name.partition("::")[0]


def _seconds(block: Sequence[str]) -> float:
    return sum(map(seconds_of, block))


def _cut(block: list[str], most_s: float) -> list[list[str]]:
    """A file whole, or in parts none of which takes longer than that, or than its one case."""
    parts = min(len(block), ceil(_seconds(block) / most_s))
    length = ceil(len(block) / parts)
    return [block[start : start + length] for start in range(0, len(block), length)]
