"""Freed memory stays with the process, since the next step wants the same again; or goes back to
the system at once, where a cap holds."""

# glibc gives large pieces back to the system when they are freed, and the system clears every page
# that is used again. Training frees and takes the same pieces in every step; on a CPU the clearing
# is a good part of the cost of moving them. A piece of a size is found again from about its eighth
# allocation on, since remainders of aligned pieces first fill a cache of glibc.

import ctypes
import os
import sys
from collections.abc import Mapping

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8  # malloc.h
_KEEP = {_MMAP_THRESHOLD: 1 << 30, _TRIM_THRESHOLD: 2**31 - 1, _TOP_PAD: 64 << 20}
# glibc begins with this threshold, and would raise it to the largest piece that was freed. A MiB
# was tried: the moments that an optimizer makes in its first step, and that leave for scratch then,
# left holes of half the weights' size in the heap. Threads share one heap, since each keeps pieces
# of its own.
_GIVE_BACK = {_MMAP_THRESHOLD: 128 << 10, _TRIM_THRESHOLD: 128 << 10, _TOP_PAD: 0, _ARENA_MAX: 1}


def keep_freed_memory() -> bool:
    """Tell the C library to keep freed memory, for the rest of this process.

    Nothing is done where the library is not glibc, or where variables MALLOC_... set the user's
    wish.

    Returns:
        True if the library has taken the settings.
    """
    return _settle(_KEEP)


def give_freed_memory_back() -> bool:
    """Tell the C library to give freed pieces of 128 KiB and more back to the system at once, for
    the rest of this process. It is otherwise like `keep_freed_memory`.

    A cap on a process counts what the process keeps. Where state is offloaded to stay below one,
    room counts for more than the time that clearing pages takes.
    """
    return _settle(_GIVE_BACK)


def _settle(settings: Mapping[int, int]) -> bool:
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(
        mallopt(which, value) == 1 for which, value in settings.items()
    )
