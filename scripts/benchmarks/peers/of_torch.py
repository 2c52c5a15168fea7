"""Torch's pipelining: all its schedule classes over gloo, each with a stage object or two a
rank."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from .contestant import Contestant

_KEEPS = {"FORWARD": 1, "FULL_BACKWARD": -1, "BACKWARD_WEIGHT": -1}
_VEE = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
SPLITS = (*_VEE, "ScheduleInterleavedZeroBubble")
NAMES = ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleLoopedBFS", *SPLITS)


def chunks_of(name: str) -> int:
    """Stages a rank."""
    return 2 if issubclass(getattr(schedules, name), schedules.PipelineScheduleMulti) else 1


def stages_of(name: str, rank: int, ranks: int) -> list[int]:
    """Where a schedule wants its stages."""
    if chunks_of(name) == 1:
        return [rank]
    return [rank, 2 * ranks - 1 - rank] if name in _VEE else [rank, ranks + rank]


def contestant(
    name: str,
    modules: Callable[[int, int], nn.Module],
    examples: Callable[[int], tuple[Tensor, Tensor]],
    loss_fn: Callable[..., Tensor],
    batches: Iterator[tuple[Tensor, Tensor]],
    microbatches: int,
    optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer] | None,
    clip: float = 0.0,
) -> Contestant:
    """A schedule of torch's.

    Args:
        name: of its class.
        modules: (stage, chunks a rank) to the module of a stage.
        examples: stage to an input and an output, so that nothing is inferred.
        loss_fn: of outputs and target.
        batches: (inputs, target) of whole steps.
        microbatches: a step.
        optimizer: of this rank's parameters; None: there are none.
        clip: the largest norm of all gradients; 0: no limit.
    """
    rank, ranks, chunks = dist.get_rank(), dist.get_world_size(), chunks_of(name)
    numbers = stages_of(name, rank, ranks)
    layers = [modules(number, chunks) for number in numbers]
    stages = []
    for number, layer in zip(numbers, layers, strict=True):
        given, made = examples(number)
        stages.append(
            PipelineStage(
                layer,
                number,
                ranks * chunks,
                torch.device("cpu"),
                input_args=(given,),
                output_args=(made,),
            )
        )
    schedule = getattr(schedules, name)(
        stages if chunks > 1 else stages[0], microbatches, loss_fn=loss_fn
    )
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    stepper = optimizer(parameters) if optimizer else None
    first, last = 0 in numbers, ranks * chunks - 1 in numbers

    def step() -> None:
        inputs, target = next(batches)
        kept: dict[str, Any] = {"target": target, "losses": []} if last else {}
        schedule.step(*((inputs,) if first else ()), return_outputs=False, **kept)
        if clip:
            _clip(parameters, clip)
        if stepper is not None:
            stepper.step()
            stepper.zero_grad()

    splits = name in SPLITS
    return Contestant(
        name.removeprefix("Schedule"),
        "torch",
        step,
        (2 + splits) * chunks * microbatches,
        splits,
        layers,
        _held(name, schedule, microbatches),
    )


def _held(name: str, schedule: Any, microbatches: int) -> int:
    """Chunks that the rank with most of them keeps at most, by the schedule's own order."""
    if chunks_of(name) == 1:
        return 2 * (microbatches if name == "ScheduleGPipe" else dist.get_world_size())
    most = 0
    for of_rank in schedule.pipeline_order.values():
        held = 0
        for action in of_rank:
            for one in (action.sub_actions or (action,)) if action else ():
                held += _KEEPS.get(one.computation_type.name, 0)
                most = max(most, held)
    return most


@torch.no_grad()
def _clip(parameters: Sequence[nn.Parameter], limit: float) -> None:
    """Over all ranks, as a training script writes it."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    squared = torch.nn.utils.get_total_norm(gradients) ** 2
    dist.all_reduce(squared)
    torch.nn.utils.clip_grads_with_norm_(parameters, limit, squared.sqrt())
