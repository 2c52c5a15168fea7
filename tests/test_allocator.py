"""Freed memory stays with the process, so that soon the next piece costs no page faults; or it
leaves at once.

glibc puts the small remainders before an aligned piece into a cache of seven. Until that is full,
a freed piece may be too small, by such a remainder, for the next one of the same size.
"""

import resource
import subprocess
import sys

import pytest

# Pieces of 36 MiB: glibc maps what is larger than 32 afresh, whatever was freed before.
PROGRAM = """
import resource, torch
from axrt.device.allocator import keep_freed_memory
kept = keep_freed_memory()
for _ in range(12):
    torch.zeros(9 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    torch.zeros(9 << 20)
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


# Whether it is kept is said without torch.
SAYS = "from axrt.device.allocator import keep_freed_memory; print(keep_freed_memory())"


def printed_by(program: str) -> list[str]:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.split()


def test_the_next_piece_of_the_same_size_is_there_already(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = 5 * (36 << 20) // resource.getpagesize()
    kept, count = printed_by(PROGRAM)
    if kept == "True":  # glibc
        assert int(count) < pages / 10
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1")
    assert printed_by(SAYS) == ["False"]


GIVING_BACK = """
import psutil, torch
from axrt.device.allocator import give_freed_memory_back
gives = give_freed_memory_back()
kept = [torch.ones(1 << 18) for _ in range(64)]
before = psutil.Process().memory_info().rss
del kept[::2]
print(gives, (before - psutil.Process().memory_info().rss) >> 20)
"""


def test_what_is_freed_leaves_the_process_at_once() -> None:
    gives, mib = printed_by(GIVING_BACK)
    if gives == "True":
        assert int(mib) >= 31, "every other piece of 64 was freed, of a MiB each"
