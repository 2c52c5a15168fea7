"""A rank that is killed while ranks try whether messages arrive without their sender, or that alone
hears of another one's end and leaves. The others say whether they heard of it, and end."""

import os
import signal
import sys
import time

from mpi4py import MPI

from axrt.transport import single_copy


class Dying(MPI.Intracomm):
    """One that its rank does not split any more."""

    def Split_type(self, *given: object) -> MPI.Intracomm:  # noqa: N802
        os.kill(os.getpid(), signal.SIGKILL)
        return self


def main(victim: int, place: str) -> None:
    comm = MPI.COMM_WORLD
    tried = comm.Dup()  # as a transport does
    arrived_in_silence, sleep = single_copy._arrived_in_silence, time.sleep

    def dying(*given: object) -> bool:
        os.kill(os.getpid(), signal.SIGKILL)
        return False

    def leaving(node: MPI.Comm) -> bool:
        node.Barrier()
        raise MPI.Exception(MPI.ERR_OTHER)

    if comm.rank == victim:
        trials = {"before": dying, "leaves": leaving}
        single_copy._arrived_in_silence = trials.get(place, arrived_in_silence)  # type: ignore[assignment]
        tried = Dying(tried) if place == "split" else tried
        time.sleep = dying if place == "within" else sleep  # type: ignore[assignment]
    try:
        single_copy.single_copy_peers(tried)
        told = "went on"
    except MPI.Exception:
        told = "heard"
    os.write(1, f"rank {comm.rank} {told}\n".encode())
    if place == "leaves":
        comm.Barrier()  # whoever has not heard of it waits for a rank that lives
    sleep(1)  # so that no end of a rank is taken for a loss
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
