"""The MPI library before it starts: some end the process when they are started by a launcher that
they do not know."""

import sys
from collections.abc import Mapping
from typing import Any

from axrt.errors import LaunchError

FITTING = (
    "Use the mpirun of the library's own installation (.venv/bin/mpirun for the one from PyPI), "
    "under Slurm `srun --mpi=pmix` or "
    "`--mpi=pmi2`, or point MPI4PY_LIBMPI at the library that belongs to the launcher"
)
_OWN_OF_MPICH = ("PMI_RANK", "PMI_FD", "PMI_PORT")


def loaded() -> Any:
    """The module `mpi4py.MPI`, without starting MPI.

    Unless the module was imported before, MPI does not start with the import and ends with the
    process.
    """
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
    from mpi4py import MPI

    return MPI


def check_knows_launcher(version: str, environment: Mapping[str, str]) -> None:
    """Check that the MPI library can be started under this launcher.

    MPICH ends the process under PMIx (Open MPI's mpirun, prterun, `srun --mpi=pmix`), unless it was
    built with it; its version text says so.

    Args:
        version: text of `MPI.Get_library_version()`.
        environment: variables of this process.
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
