"""How a process of a job ends."""

import ctypes
import os
import sys
import time
from typing import NoReturn

_EXIT = os._exit  # before `install_hooks`
LAST_WORDS_S = 0.3  # Open MPI drops what a rank has printed when another one ends first


def leave(code: int) -> NoReturn:
    """End this process, and nothing else."""
    _EXIT(code)


def leave_in_order(code: int) -> NoReturn:
    """End this process after the end of MPI.

    The C library's `exit` lets MPICH take leave of its launcher. Without that Hydra takes the rank
    for killed, and mpirun's code is 9.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).exit(code)
    leave(code)


def leave_at_once(code: int) -> NoReturn:
    """End this process without the end of MPI, which may wait for ranks that are lost."""
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(LAST_WORDS_S)
    leave(code)
