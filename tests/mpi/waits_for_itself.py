"""A rank that waits for nobody else, and looks for messages meanwhile; the other waits for it."""

import os
import time

from mpi4py import MPI

from axrt.errors import PeerLostError
from axrt.heartbeat import Heartbeat

PATIENCE_S = 2.0


def main() -> None:
    rank = MPI.COMM_WORLD.rank
    heartbeat = Heartbeat(MPI.COMM_WORLD.Dup(), PATIENCE_S)
    owing = (lambda: (1,)) if rank == 0 else lambda: ()
    until_s = time.monotonic() + 10 * PATIENCE_S
    told = "nothing"
    while time.monotonic() < until_s and told == "nothing":
        try:
            heartbeat.waits(owing)
        except PeerLostError as error:
            told = str(error)
        looks_until_s = time.monotonic() + 1e-3  # a fifth of a core
        while time.monotonic() < looks_until_s:
            pass
        time.sleep(4e-3)
    if rank == 0:
        os.write(1, f"{told}\n".encode())
        MPI.COMM_WORLD.Abort(0)
    time.sleep(60)


if __name__ == "__main__":
    main()
