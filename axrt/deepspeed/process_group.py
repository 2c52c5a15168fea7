"""`deepspeed.init_distributed`: a process group of torch's for the script's own barriers and
collectives. The engine does not use it."""

import os
import socket

import torch.distributed as dist

from axrt.world.joining import join
from axrt.world.mpi_world import MpiWorld
from axrt.world.world import World


def init_distributed(dist_backend: str | None = None, *others: object, **keywords: object) -> None:
    """Start the ranks, and a process group of torch's with all of them.

    It sets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as DeepSpeed does.

    Args:
        dist_backend: backend of the group; None: "nccl" on GPUs, else "gloo", which also takes the
            place of "nccl" where there is no GPU.
        *others, **keywords: DeepSpeed's other arguments, which change nothing: the launcher says
            what they say.
    """
    world = join()
    host, port = _meeting(world)
    told = {
        "RANK": world.rank,
        "LOCAL_RANK": world.node_rank,
        "WORLD_SIZE": world.size,
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in told.items()})
    if not dist.is_initialized():
        on_cpu = world.device.type == "cpu"
        backend = "gloo" if on_cpu and dist_backend == "nccl" else dist_backend
        dist.init_process_group(backend or ("gloo" if on_cpu else "nccl"))


def _meeting(world: World) -> tuple[str, int]:
    """The host of the first rank and a free port there."""
    with socket.socket() as free:
        free.bind(("", 0))
        mine = (socket.gethostname() if world.size > 1 else "localhost", free.getsockname()[1])
    if isinstance(world, MpiWorld):
        found: tuple[str, int] = world.comm.bcast(mine)
        return found
    return mine
