"""The MPI library before it starts: some end the process when they are started by a launcher that
they do not know."""

import ctypes
import faulthandler
import os
import sys
from collections.abc import Mapping
from typing import Any

import mpi4py
import psutil
import torch

from axrt.errors import LaunchError

FITTING = (
    "Use the mpirun of the library's own installation (.venv/bin/mpirun for the one from PyPI), "
    "under Slurm `srun --mpi=pmix` or "
    "`--mpi=pmi2`, or point MPI4PY_LIBMPI at the library that belongs to the launcher"
)
_OWN_OF_MPICH = ("PMI_RANK", "PMI_FD", "PMI_PORT")
_NAMES = ("libmpi.so", "libmpi_abi.so", "libmpich.so")
# The questions that a library answers about a device's memory, by type of device in torch's words;
# torch says "cuda" for ROCm as well.
_CUDA = ("MPIX_Query_cuda_support",)
_ROCM = ("MPIX_Query_rocm_support", "MPIX_Query_hip_support")
_QUERIES = {"cuda": _ROCM if torch.version.hip else _CUDA, "xpu": ("MPIX_Query_ze_support",)}


# MPI is started through `ctypes`. The call of mpi4py holds the interpreter, so that no thread could
# notice that another rank never comes; a watchdog outside of Python ended the process with a bare
# trace and code 1. `start_watch.py` ends it with a sentence and code 69.
def loaded() -> Any:
    """The module `mpi4py.MPI`, without starting MPI.

    Unless the module was imported before, MPI does not start with the import and ends with the
    process.
    """
    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
    from mpi4py import MPI

    return MPI


def start(MPI: Any, patience_s: float) -> None:  # noqa: N803
    """Start MPI for several threads, while threads of Python go on.

    The module's own call holds the interpreter, so that nobody could notice that another rank does
    not come. So the library's is called, which is found among those that the module needs.

    Args:
        MPI: the module `mpi4py.MPI`.
        patience_s: seconds after which the process ends where only the module's own call is found,
            with the trace of this function; 0: no limit.
    Raises:
        RuntimeError: the library could not be started.
    """
    try:
        call = ctypes.CDLL(MPI.__file__).MPI_Init_thread
    except (AttributeError, OSError):
        if patience_s:
            faulthandler.dump_traceback_later(patience_s, exit=True)
        try:
            MPI.Init_thread()
        finally:
            faulthandler.cancel_dump_traceback_later()
        return
    if code := call(None, None, MPI.THREAD_MULTIPLE, ctypes.byref(ctypes.c_int())):
        raise RuntimeError(f"MPI_Init_thread has returned {code}")
    if mpi4py.rc.errors == "exception":  # as the module's call does
        for comm in (MPI.COMM_SELF, MPI.COMM_WORLD):
            comm.Set_errhandler(MPI.ERRORS_RETURN)


def loaded_library() -> str:
    """The file of the MPI library that is mapped into this process; "" where there is none."""
    for mapped in psutil.Process().memory_maps():
        if os.path.basename(mapped.path).startswith(_NAMES):
            return str(mapped.path)
    return ""


def is_device_aware(device_type: str) -> bool:
    """True if the MPI library says that it may touch the memory of devices of a type.

    A wrong guess ends in a segmentation fault, so only the library itself is believed. It is asked
    by its file, since mpi4py loads it in a way that hides its names from everyone else. MPI must
    have started: MPICH ends a process that asks before.
    """
    asked = _QUERIES.get(device_type, ())
    if not asked or not (file := loaded_library()):
        return False
    library = ctypes.CDLL(file)
    queries = [getattr(library, name, None) for name in asked]
    return any(query() for query in queries if query is not None)


def check_knows_launcher(version: str, environment: Mapping[str, str]) -> None:
    """Check that the MPI library can be started under this launcher.

    MPICH ends the process under PMIx (Open MPI's mpirun, prterun, `srun --mpi=pmix`), unless it was
    built with it; its version text says so.

    Raises:
        LaunchError: the library would end the process at its start.
    """
    speaks_pmix = not version.startswith("MPICH") or "pmix" in version.lower()
    if (
        "PMIX_RANK" in environment
        and not speaks_pmix
        and not any(name in environment for name in _OWN_OF_MPICH)
    ):
        raise LaunchError(
            "a launcher that speaks PMIx (Open MPI's mpirun, prterun, srun --mpi=pmix) started "
            "this process as rank "
            f"{environment['PMIX_RANK']}, and the MPI library is "
            f"{' '.join(version.splitlines()[0].split())}, built without PMIx: the "
            f"launcher and the MPI library are of different kinds. {FITTING}"
        )
