"""A script for DeepSpeed's pipeline engine, in the form of its pipeline tutorial.

Its imports alone say whose engine it is; `AS_WRITTEN` takes DeepSpeed's own.
"""
# mypy: ignore-errors

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

if os.environ.get("AS_WRITTEN"):
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.pipe import PipelineModule
    from deepspeed.utils import RepeatingLoader
else:
    import axrt.deepspeed as deepspeed
    from axrt.deepspeed.accelerator import get_accelerator
    from axrt.deepspeed.pipe import PipelineModule
    from axrt.deepspeed.utils import RepeatingLoader


class Net(nn.Module):
    """The shape of torchvision's AlexNet, for images of 32 x 32 pixels and without dropout."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 5, stride=2, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(inplace=True),
        )
        self.avgpool = nn.AdaptiveAvgPool2d((4, 4))
        self.classifier = nn.Sequential(
            nn.Linear(32 * 4 * 4, 64), nn.ReLU(inplace=True), nn.Linear(64, classes)
        )


def join_layers(net):
    return [*net.features, net.avgpool, lambda x: torch.flatten(x, 1), *net.classifier]


def trainset(local_rank):
    dist.barrier()
    if local_rank != 0:
        dist.barrier()
    generator = torch.Generator().manual_seed(3)  # where the tutorial downloads CIFAR-10
    images = torch.randn(256, 3, 32, 32, generator=generator)
    labels = torch.randint(10, (256,), generator=generator)
    if local_rank == 0:
        dist.barrier()
    return TensorDataset(images, labels)


def get_args():
    parser = argparse.ArgumentParser(description="images")
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("-s", "--steps", type=int, default=4)
    parser.add_argument("-p", "--pipeline-parallel-size", type=int, default=2)
    parser.add_argument("--backend", type=str, default="nccl")
    parser.add_argument("--seed", type=int, default=1138)
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def main(args):
    torch.manual_seed(args.seed)
    deepspeed.runtime.utils.set_random_seed(args.seed)
    net = Net(classes=10)
    net = PipelineModule(
        layers=join_layers(net),
        loss_fn=nn.CrossEntropyLoss(),
        num_stages=args.pipeline_parallel_size,
        partition_method="parameters",
        activation_checkpoint_interval=0,
    )
    data = trainset(args.local_rank)
    engine, _, loader, _ = deepspeed.initialize(
        args=args,
        model=net,
        model_parameters=[p for p in net.parameters() if p.requires_grad],
        training_data=data,
    )
    for step in range(args.steps):
        loss = engine.train_batch()
        if dist.get_rank() == 0:
            print(f"loss {step} {loss.item():.9f} {engine.get_lr()[0]:.9f}", flush=True)
    again = iter(RepeatingLoader(loader)) if loader is not None else None
    assert again is None or len(next(again)) == 2


if __name__ == "__main__":
    args = get_args()
    deepspeed.init_distributed(dist_backend=args.backend)
    args.local_rank = int(os.environ["LOCAL_RANK"])
    get_accelerator().set_device(args.local_rank)
    main(args)
    sys.stdout.flush()
