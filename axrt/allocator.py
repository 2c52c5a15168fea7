"""Freed memory stays with the process, since the next step wants the same again.

glibc gives large pieces back to the system when they are freed, and the system clears every page
that is used again. Training frees and takes the same pieces in every step; on a CPU the clearing is
a good part of the cost of moving them. A piece of a size is found again from about its eighth
allocation on, since remainders of aligned pieces first fill a cache of glibc.
"""

import ctypes
import os
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # malloc.h
_SETTINGS = {_MMAP_THRESHOLD: 1 << 30, _TRIM_THRESHOLD: 2**31 - 1, _TOP_PAD: 64 << 20}


def keep_freed_memory() -> bool:
    """Tell the C library to keep freed memory, for the rest of this process.

    Nothing is done where the library is not glibc, or where variables MALLOC_... set the user's
    wish.

    Returns:
        True if the library has taken the settings.
    """
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(
        mallopt(which, value) == 1 for which, value in _SETTINGS.items()
    )
