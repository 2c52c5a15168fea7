"""DeepSpeed's pipeline engine (1F1B) over gloo, where it is installed."""

import importlib.util
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .contestant import Contestant


def is_installed() -> bool:
    return importlib.util.find_spec("deepspeed") is not None


def contestant(
    layers: Sequence[nn.Module],
    loss_fn: Callable[..., Tensor],
    batches: Iterator[tuple[Tensor, Tensor]],
    microbatches: int,
    microbatch_size: int,
    optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer],
    clip: float = 0.0,
    stages: int = 0,
) -> Contestant:
    """Its 1F1B.

    Args:
        layers: of the whole model; DeepSpeed cuts them evenly by number.
        loss_fn: of outputs and target.
        batches: (inputs, target) of microbatches.
        microbatches: a step.
        microbatch_size: sequences or rows.
        optimizer: of this rank's parameters.
        clip: the largest norm of all gradients; 0: no limit.
        stages: of a pipeline; 0: one a rank.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    os.environ.update(
        DS_ACCELERATOR="cpu", RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank)
    )
    import deepspeed
    from deepspeed.pipe import PipelineModule

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    module = PipelineModule(
        layers=list(layers),
        num_stages=stages or ranks,
        loss_fn=loss_fn,
        partition_method="uniform",
        base_seed=0,
    )
    mine = [parameter for parameter in module.parameters() if parameter.requires_grad]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": microbatch_size,
        "gradient_accumulation_steps": microbatches,
        "gradient_clipping": clip,
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=optimizer(mine), model_parameters=mine, config=config
    )

    def step() -> None:
        engine.train_batch(data_iter=batches)

    held = 2 * (stages or ranks)
    return Contestant("1F1B", "DeepSpeed", step, 2 * microbatches, layers=layers, held=held)
