"""Torch's own ways: one process, DistributedDataParallel with and without ZeroRedundancyOptimizer,
and `fully_shard` (FSDP2), over gloo.

The gradients of replicas are reduced at the last microbatch of a step. FSDP2 reduces them at each,
since it would keep whole gradients else; `accumulates` asks for that.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from axrt.model import cross_entropy

from .contestant import Contestant
from .model import Sizes, adamw, adamw_options, batches_of, layers_of
from .reach import tensors_in
from .traffic import RingTraffic


class _Way(NamedTuple):
    """A way to train.

    Args:
        module: the model.
        optimizer: of its parameters.
        before_last: makes the context of every microbatch of a step but the last.
        forgets: True to let gradients go after a step; False to keep them as zeros.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    before_last: Callable[[], AbstractContextManager[Any]] = nullcontext
    forgets: bool = True


def contestant(sizes: Sizes, options: dict[str, Any]) -> Contestant:
    """A way, ready to train.

    Args:
        sizes: of the run.
        options: "way", a key of `WAYS`, and the arguments of its function.
    """
    arguments = {key: value for key, value in options.items() if key != "way"}
    module, optimizer, before_last, forgets = WAYS[options["way"]](sizes, **arguments)
    ranks = dist.get_world_size()
    batches, number = batches_of(sizes, dist.get_rank(), ranks), sizes.microbatches // ranks

    def backward() -> float:
        inputs, targets = next(batches)
        loss = cross_entropy(module(inputs), targets) / number
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    def step() -> float:
        losses = []
        for microbatch in range(number):
            with before_last() if microbatch < number - 1 else nullcontext():
                losses.append(backward())
        optimizer.step()
        optimizer.zero_grad(set_to_none=forgets)
        return sum(losses)

    def held() -> Iterator[Tensor]:
        roots = [list(module.parameters()), optimizer]
        return tensors_in(roots, "torch.optim", "torch.distributed.optim")

    return Contestant(step, held, RingTraffic, lambda: None)


def _plain(sizes: Sizes) -> _Way:
    module = layers_of(sizes)
    return _Way(module, adamw(module.parameters()))


def _ddp(sizes: Sizes, zero: bool = False) -> _Way:
    module = DistributedDataParallel(
        layers_of(sizes), bucket_cap_mb=sizes.block_mb, gradient_as_bucket_view=True
    )
    optimizer = (_sharded if zero else adamw)(module.parameters())
    # What is let go comes back outside of the buckets, which stay: 4 bytes a parameter more.
    return _Way(module, optimizer, module.no_sync, forgets=False)


def _sharded(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return ZeroRedundancyOptimizer(
        parameters, torch.optim.AdamW, parameters_as_bucket_view=True, **adamw_options()
    )


def _fsdp(sizes: Sizes, reshard: bool, accumulates: bool = False, offloads: bool = False) -> _Way:
    """FSDP2, layer by layer.

    Args:
        sizes: of the run.
        reshard: True to let whole weights go after a forward and gather them again (ZeRO-3).
        accumulates: True to reduce gradients at the last microbatch alone.
        offloads: True for shards in the memory of the CPU.
    """
    module = layers_of(sizes)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = CPUOffloadPolicy(pin_memory=False) if offloads else OffloadPolicy()
    for layer in (*module, module):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard, offload_policy=policy)
    assert isinstance(module, FSDPModule)
    way = _Way(module, adamw(module.parameters()))
    return way._replace(before_last=_Accumulating(module).within) if accumulates else way


class _Accumulating:
    """Lets FSDP2 reduce nothing for a while."""

    def __init__(self, module: FSDPModule) -> None:
        self._module = module

    def within(self) -> "_Accumulating":
        return self

    def __enter__(self) -> None:
        self._module.set_requires_gradient_sync(False)

    def __exit__(self, *_: object) -> None:
        self._module.set_requires_gradient_sync(True)


WAYS: dict[str, Callable[..., _Way]] = {"plain": _plain, "ddp": _ddp, "fsdp": _fsdp}
