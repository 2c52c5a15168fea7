"""Runs every case of a module on the ranks of one job, since starting Python with torch costs
seconds:

mpirun -n N python -m tests.mpi.runner MODULE OUT
"""

import json
import sys
import traceback
from importlib import import_module
from pathlib import Path

import torch
from mpi4py import MPI


def main(module: str, out: Path) -> None:
    cases = import_module(module)
    torch.set_num_threads(1)
    comm, results = MPI.COMM_WORLD, {}
    for name in cases.names(comm.size):
        try:
            getattr(cases, name)(comm.Dup())
            failure = ""
        except BaseException:
            failure = f"rank {comm.rank}:\n{traceback.format_exc()}"
            # The other ranks may wait for this one for ever: say what happened and end the job.
            out.with_suffix(f".{name}.failed").write_text(failure)
            comm.Abort(1)
        results[name] = failure
        comm.Barrier()
        if comm.rank == 0:
            out.write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
