"""Modules that a user gives as they are may have other weights in each process: before anything is
built, every pipe takes those of the first one."""

import torch
from torch import nn

from axrt.model.layers import Layer
from axrt.scheduler.job import Job
from axrt.transport.control import ControlMessage, Topic

from .rank import Rank


# Given modules take the first pipe's values before anything is built, on the user's own tensors:
# afterwards masters are in shards, or in scratch.
def share_initial_weights(rank: Rank, job: Job, layers: list[Layer]) -> None:
    """Give every pipe the first pipe's weights and buffers of layers that are modules.

    Args:
        rank: this rank; all of them call it.
    """
    exchange, mesh = rank.exchange, rank.mesh
    mine = [
        (stage, job.pipe_of(mesh.data_rank, mesh.pipe_rank, stage, mesh.member), place, layer)
        for stage in job.placement.stages_of(mesh.pipe_rank)
        for place in range(job.cuts[stage], job.cuts[stage + 1])
        if isinstance(layer := layers[place], nn.Module)
    ]

    def rank_of(pipe: int, stage: int) -> int:
        return mesh.rank_of(*job.place_of(pipe, stage))

    for stage, pipe, place, layer in mine:
        for other in range(1, job.pipes) if pipe == 0 else ():
            # Copies: training will change the values while the network still reads them.
            copies = [value.detach().clone() for value in _values(layer)]
            exchange.tell(rank_of(other, stage), ControlMessage(Topic.VALUES, 0, place), copies)
    rank.loop.flush()
    for stage, pipe, place, layer in mine:
        if pipe > 0:
            from_first = exchange.claim(Topic.VALUES, place, [rank_of(0, stage)])
            (theirs,) = exchange.awaited(from_first, f"the weights of layer {place}")
            with rank.loop.computing(), torch.no_grad():
                for value, its in zip(_values(layer), theirs, strict=True):
                    value.copy_(its)


def _values(layer: nn.Module) -> list[torch.Tensor]:
    return [*layer.parameters(), *layer.buffers()]
