"""Runs every case of a module on the ranks of one job, since starting Python with torch costs
seconds:

mpirun -n N python -m tests.mpi.runner MODULE OUT [CASE ...]
"""

import faulthandler
import json
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import torch
from mpi4py import MPI

from tests.device import simulated

from .jobs import CASE_S, DEVICE


def main(module: str, out: Path, only: Sequence[str]) -> None:
    is_simulated = os.environ.get(DEVICE) == simulated.NAME
    device = simulated.accelerator() if is_simulated else None
    cases = import_module(module)
    torch.set_num_threads(1)
    comm, results = MPI.COMM_WORLD, {}
    for name in only or cases.names(comm.size):
        # A case that hangs ends the job, and says where; how long all of them take does not matter.
        faulthandler.dump_traceback_later(CASE_S, exit=True)
        try:
            getattr(cases, name)(comm.Dup())
            if device is not None:
                device.check_clocks()
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
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
