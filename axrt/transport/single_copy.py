"""Some ranks take a large message of this rank without its help (single copy)."""

# Within a node most MPI libraries let the receiver read the sender's memory, where the system
# allows it. Its sender then need not look after the message while it computes, which would cost it
# some 30 us of its core a look. Where the system does not allow it, as in many containers, and
# between nodes, it must.
#
# No call of MPI says which holds. So ranks try it, in pairs, when a transport begins.

import time
from contextlib import suppress

from mpi4py import MPI

# The smallest tensor beside an envelope, and more than libraries keep for messages under way.
_TRIED_BYTES = (33 * 1024, 64 * 1024, 256 * 1024, 1 << 20)
_TRIALS = 3  # a rank that the system gives no core for a while sees nothing arrive
_SILENCE_S = 20e-3
_LOOK_S = 100e-6


def single_copy_peers(communicator: MPI.Comm) -> frozenset[int]:
    """Ranks that take a large message of this rank while this rank makes no call of MPI.

    All ranks of the communicator call it, and no other thread of theirs calls MPI meanwhile. One
    pair stands for all of a node. It takes 20 to 60 ms. Where ranks are so busy that the trials say
    nothing, it finds nobody.

    Raises:
        MPI.Exception: a rank has gone; where MPI can, the others of its node hear of it.
    """
    # A rank that is lost here ends it on all: it is a collective. Open MPI 5.0.11 crashes where a
    # communicator is revoked that a slower rank still makes.
    node = communicator.Split_type(MPI.COMM_TYPE_SHARED)
    try:
        here = frozenset(node.allgather(communicator.rank)) - {communicator.rank}
        found = bool(here) and any(
            node.allreduce(_arrived_in_silence(node), MPI.LAND) for _ in range(_TRIALS)
        )
    except MPI.Exception:
        with suppress(MPI.Exception, NotImplementedError):
            node.Revoke()  # else one whose own calls succeed would wait for a partner that left
        raise
    node.Free()
    return here if found else frozenset()


def _arrived_in_silence(node: MPI.Comm) -> bool:
    """An even rank sends to the next one and makes no call for 20 ms. Returns False on a receiver
    that had to wait longer, and True everywhere else."""
    partner = node.rank ^ 1
    node.Barrier()
    if partner >= node.size:
        return True
    memories = [bytearray(size) for size in _TRIED_BYTES]
    if node.rank < partner:
        requests = [node.Isend([memory, MPI.BYTE], partner) for memory in memories]
        time.sleep(_SILENCE_S)
        silent_until_s = time.monotonic()
        MPI.Request.Waitall(requests)
        node.send(silent_until_s, partner)
        return True
    requests = [node.Irecv([memory, MPI.BYTE], partner) for memory in memories]
    while not MPI.Request.Testall(requests):
        time.sleep(_LOOK_S)  # other ranks may want the core
    arrived_s = time.monotonic()  # one clock for all processes of a node
    return bool(arrived_s < node.recv(source=partner))
