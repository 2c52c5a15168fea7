"""What launchers say of a process: its rank and the number of ranks, by their variables."""

# When launcher and library do not fit, N processes come up as N worlds of one and each would train
# the whole model. So the rank and size in the launcher's environment are compared with those of
# MPI.

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from axrt.errors import LaunchError

from .mpi_library import FITTING


@dataclass(frozen=True, slots=True)
class Told:
    """The rank and size that the launcher's environment gives this process."""

    launcher: str  # name of the launcher whose variables were found
    rank: int  # rank of this process in the job
    size: int | None  # number of ranks of the job; None where it is not said
    local_rank: int | None  # index of this process on its node; None where it is not said


# SLURM_NTASKS is missing on purpose: a batch script carries it, and everything started from there.
# Slurm comes last, because other launchers start their daemons through srun, and ranks inherit the
# daemons'
# variables.
_VARIABLES = (
    (
        "Open MPI's mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
    ),
    (
        "MVAPICH's mpirun_rsh",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
    ),
    ("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK"),
    ("mpirun (PMI)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)


def told(environment: Mapping[str, str] = os.environ) -> Told | None:
    """Read the launcher's variables.

    Returns:
        None where no launcher has set any.
    """
    locals_ = [
        environment[local_rank] for _, _, _, local_rank in _VARIABLES if local_rank in environment
    ]
    for launcher, rank, size, local_rank in _VARIABLES:
        if rank in environment and size in environment:
            # srun --mpi=pmi2 sets PMI_RANK and no local rank of that family; its own variable says
            # it.
            local = environment.get(local_rank, locals_[0] if locals_ else None)
            return Told(
                launcher,
                int(environment[rank]),
                int(environment[size]),
                None if local is None else int(local),
            )
    if "PMIX_RANK" in environment:  # last: Open MPI's mpirun and Slurm's PMIx set it as well
        return Told("prterun (PMIx)", int(environment["PMIX_RANK"]), None, None)
    return None


def check_launcher(said: Told | None, environment: Mapping[str, str] = os.environ) -> None:
    """Check that no launcher has started several processes that MPI knows nothing of, each of which
    would train a whole model alone, or wait for ever.

    Args:
        said: the variables of a launcher that MPI knows; None where there is none.
    Raises:
        LaunchError: torchrun, accelerate or deepspeed has.
    """
    size = environment.get("WORLD_SIZE", "")
    is_known = said is not None and said.size != 1
    if is_known or "RANK" not in environment or not size.isdecimal() or int(size) < 2:
        return
    words = shlex.join([arg for arg in sys.argv if not arg.startswith("--local_rank=")])
    raise LaunchError(
        f"this process is one of {size} that torchrun, accelerate or deepspeed has started (RANK "
        "and WORLD_SIZE say so), and ranks of axrt come up by MPI; expected "
        f"mpirun -n {size} python {words}. If something else has set them: run.transport = 'local' "
        "for one process alone, or 'mpi'"
    )


def check_world(said: Told | None, rank: int, size: int) -> None:
    """Compare MPI's rank and size with the launcher's.

    Args:
        said: the launcher's variables; None where there is no launcher.
    Raises:
        LaunchError: they differ.
    """
    if said is not None and (said.size or size, said.rank) != (size, rank):
        of = f" of {said.size}" if said.size else ""
        raise LaunchError(
            f"{said.launcher} started this process as rank {said.rank}{of}, but MPI came up as "
            f"rank {rank} of {size}: the "
            f"launcher and the MPI library are of different kinds. {FITTING}"
        )
