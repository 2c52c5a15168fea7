"""Memory that is freed stays with the process, for the next step wants the same again.

glibc gives large pieces back to the system when they are freed, and the system clears every page of
them that is used again. Training frees and takes the same pieces in every step; on a CPU that is a
good part of what moving them costs.
"""

import ctypes
import os
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # malloc.h
_SETTINGS = {_MMAP_THRESHOLD: 1 << 30, _TRIM_THRESHOLD: 2**31 - 1, _TOP_PAD: 64 << 20}


def keep_freed_memory() -> bool:
    """Tell the C library so, for the rest of this process; returns whether it listens.

    Nothing is done where it is not glibc, or where variables MALLOC_..._ say what the user wants.
    """
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(
        mallopt(which, value) == 1 for which, value in _SETTINGS.items()
    )
