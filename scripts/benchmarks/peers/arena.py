"""One rank of a job in which all runtimes live side by side: they train in turn, in an order drawn
anew for each round.

axrt speaks MPI, through the node's shared memory; torch and DeepSpeed speak gloo, through the
loopback device, for want of another backend on CPUs.
"""

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from axrt.transport.waiting import sharpen_sleep

from .contestant import Contestant


def join(store: str) -> None:
    """Bring gloo up beside MPI, which mpi4py has started; both sides sleep as exactly."""
    from mpi4py import MPI

    torch.set_num_threads(1)
    sharpen_sleep()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=MPI.COMM_WORLD.rank,
        world_size=MPI.COMM_WORLD.size,
    )


class Took(NamedTuple):
    """What some steps took.

    Args:
        wall_s: from the first rank's start to the last rank's end; ranks of one node share its
            clock.
        cpu_s: of all ranks.
    """

    wall_s: float
    cpu_s: float


def timed(step: Callable[[], None], steps: int) -> Took:
    """So many steps in a row; every rank calls it."""
    dist.barrier()  # of gloo: a rank that waits does not burn its core
    began_s, cpu_s = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    mine = began_s, time.perf_counter(), time.process_time() - cpu_s
    all_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_ranks, mine)
    began, ended, used = zip(*all_ranks, strict=True)
    return Took(max(ended) - min(began), sum(used))


def settle() -> None:
    """What stands by now is out of Python's garbage collection, for every runtime."""
    gc.collect()
    gc.freeze()


def in_turn(contestants: Sequence[Contestant], rounds: int) -> Iterator[tuple[int, Contestant]]:
    """Every contestant in every round; round 0 warms up."""
    random = Random(0)
    for number in range(rounds + 1):
        order = list(contestants)
        random.shuffle(order)
        for contestant in order:
            yield number, contestant
        if number == 0:
            settle()
