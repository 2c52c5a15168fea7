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
    """The module `mpi4py.MPI`; unless someone has imported it before, MPI has not started and ends
    with the process."""
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
    from mpi4py import MPI

    return MPI


def check_knows_launcher(version: str, environment: Mapping[str, str]) -> None:
    """Raise `LaunchError` where a library of this version would end the process at its start.

    MPICH does that under PMIx (Open MPI's mpirun, prterun, `srun --mpi=pmix`), unless it was
    configured with it; its version says so.
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
