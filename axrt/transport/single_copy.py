"""Whether a receiver within the node takes a large message by itself (single copy).

Most MPI libraries let the receiver read the sender's memory, where the system allows it. Its sender
then need not look after the message while it computes, which would cost it some 30 us of its core a
look. Where the system does not allow it, as in many containers, and between nodes, it must.

No call of MPI says which holds. So ranks try it once, in pairs, when a transport begins.
"""

import time

from mpi4py import MPI

# Above what is sent eagerly, and above what fits what a library keeps for messages under way.
_TRIED_BYTES = (16 * 1024, 256 * 1024, 1 << 20)
_SILENCE_S = 20e-3
_LOOK_S = 100e-6


def ranks_that_take_alone(communicator: MPI.Comm) -> frozenset[int]:
    """Ranks that take a large message of this rank while this rank makes no call of MPI.

    All ranks of the communicator call it. It takes some 20 ms. Where ranks are so busy that the
    trial says nothing, it finds nobody.
    """
    node = communicator.Split_type(MPI.COMM_TYPE_SHARED)
    here = frozenset(node.allgather(communicator.rank)) - {communicator.rank}
    take_alone = node.allreduce(_taken_alone(node), MPI.LAND) if here else False
    node.Free()
    return here if take_alone else frozenset()


def _taken_alone(node: MPI.Comm) -> bool:
    """An even rank sends to the next one and says nothing for a while; on each rank, whether all
    arrived in that time. A rank without a partner objects to nothing."""
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
