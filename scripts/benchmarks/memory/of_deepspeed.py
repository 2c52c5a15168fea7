"""DeepSpeed's ZeRO over gloo. Its pieces are as large as a block of the model, like those of all
others."""

import logging
import os
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor

from axrt.model import cross_entropy

from .contestant import Contestant
from .model import Sizes, adamw, batches_of, layers_of
from .reach import tensors_in
from .traffic import RingTraffic


def contestant(sizes: Sizes, zero: dict[str, Any]) -> Contestant:
    """A stage of ZeRO, ready to train.

    Args:
        sizes: of the run.
        zero: section `zero_optimization`.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    os.environ.update(
        DS_ACCELERATOR="cpu", RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank)
    )
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    number = sizes.microbatches // ranks
    module = layers_of(sizes)
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=adamw(module.parameters()),
        config=_config(sizes, zero, number),
    )
    batches = batches_of(sizes, rank, ranks)

    def step() -> float:
        losses = []
        for _ in range(number):
            inputs, targets = next(batches)
            loss = cross_entropy(engine(inputs), targets)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item() / number)
        return sum(losses)

    def held() -> Iterator[Tensor]:
        roots = [list(module.parameters()), engine.optimizer]
        return tensors_in(roots, "torch.optim", "deepspeed")

    return Contestant(step, held, RingTraffic, engine.destroy)


def _config(sizes: Sizes, zero: dict[str, Any], microbatches: int) -> dict[str, Any]:
    block = sizes.block_parameters
    pieces: dict[str, Any] = {"reduce_bucket_size": block, "allgather_bucket_size": block}
    if zero["stage"] == 3:
        pieces = {
            "reduce_bucket_size": block,
            "stage3_prefetch_bucket_size": block,
            "stage3_param_persistence_threshold": 2 * sizes.width,  # norms stay whole
            "stage3_max_live_parameters": block,
            "stage3_max_reuse_distance": block,
        }
    return {
        "train_micro_batch_size_per_gpu": sizes.sequences,
        "gradient_accumulation_steps": microbatches,
        "gradient_clipping": 0.0,  # its default is 1
        "steps_per_print": 10**9,
        "zero_optimization": {**pieces, **zero},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
