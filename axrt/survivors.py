"""What the MPI library knows of lost ranks, where it goes on without them (ULFM).

Open MPI does under `mpirun --with-ft ulfm`: the other ranks live on, calls that need the lost one
raise, and a communicator without it is made. Elsewhere the launcher ends every rank.
"""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from axrt.errors import PeerLostError

if TYPE_CHECKING:
    from mpi4py import MPI

_ENABLED = "OMPI_MCA_mpi_ft_enable"  # set by Open MPI's mpirun
HOW = "Open MPI's mpirun --with-ft ulfm"


class RankLostError(PeerLostError):
    """A rank is lost, and the others may go on: `World.survivors` has the job without it.

    The engine of every rank that is left raises it, sooner or later.
    """


def can_survive(mpi: Any, environment: Mapping[str, str] = os.environ) -> bool:
    """The MPI library and the launcher keep the other ranks when one is lost.

    Args:
        mpi: the module `mpi4py.MPI`.
        environment: variables of this process.
    """
    return environment.get(_ENABLED) in ("1", "true") and hasattr(mpi.Comm, "Shrink")


def is_loss(mpi: Any, error: BaseException) -> bool:
    """The error says that a rank is lost, or that another rank has found one lost."""
    if isinstance(error, PeerLostError):
        return True
    classes = (mpi.ERR_PROC_FAILED, mpi.ERR_PROC_FAILED_PENDING, mpi.ERR_REVOKED)
    return isinstance(error, mpi.Exception) and error.Get_error_class() in classes


def all_are_lost(mpi: Any, comm: "MPI.Comm", ranks: range) -> bool:
    """All of these ranks of a communicator are known to be lost."""
    everyone, failed = comm.Get_group(), comm.Get_failed()
    places = mpi.Group.Translate_ranks(everyone, list(ranks), failed)
    return all(place != mpi.UNDEFINED for place in places)
