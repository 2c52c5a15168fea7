"""AlexNet on CIFAR-10 as a script for DeepSpeed's pipeline engine, in the form of its tutorial.

    cd examples
    mpirun -n 4 python deepspeed_alexnet.py --deepspeed_config deepspeed_alexnet.json

The three lines below are all that differs: with `import deepspeed`, `from deepspeed.accelerator
import get_accelerator` and `from deepspeed.pipe import PipelineModule` it is DeepSpeed's.
"""

import argparse
import os
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

import axrt.deepspeed as deepspeed
from axrt.deepspeed.accelerator import get_accelerator
from axrt.deepspeed.pipe import PipelineModule

RECORD = 1 + 3 * 32 * 32  # a label, and an image as red, green and blue rows
HOW = """expected the binary version of CIFAR-10, 163 MB:
    wget https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz
    tar xzf cifar-10-binary.tar.gz            # makes cifar-10-batches-bin"""


class AlexNet(nn.Module):
    """The sizes of Krizhevsky 2014, as torchvision has them."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, 11, stride=4, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(64, 192, 5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(192, 384, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(384, 256, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(256, 256, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2),
        )
        self.avgpool = nn.AdaptiveAvgPool2d((6, 6))
        self.classifier = nn.Sequential(
            nn.Dropout(),
            nn.Linear(256 * 6 * 6, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Linear(4096, classes),
        )


def joined(net: AlexNet) -> list[object]:
    """The layers of the network, one after another."""
    return [*net.features, net.avgpool, lambda value: torch.flatten(value, 1), *net.classifier]


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Images, float32, shape (3, pixels, pixels), from -1 to 1, each with its label, int64."""

    def __init__(self, folder: Path, pixels: int) -> None:
        files = sorted(folder.glob("data_batch_*.bin"))
        if not files:
            sys.exit(f"{folder}: no data_batch_1.bin there; {HOW}")
        rows = np.concatenate([np.fromfile(file, np.uint8).reshape(-1, RECORD) for file in files])
        self._images = torch.from_numpy(rows[:, 1:]).reshape(-1, 3, 32, 32)
        self._labels = torch.from_numpy(rows[:, 0].astype(np.int64))
        self._pixels = pixels

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self._images[index : index + 1].float().div(127.5).sub(1)
        scaled = functional.interpolate(image, (self._pixels, self._pixels), mode="bilinear")
        return scaled[0], self._labels[index]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="CIFAR-10")
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("-s", "--steps", type=int, default=100)
    parser.add_argument("-p", "--pipeline-parallel-size", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1138)
    parser.add_argument("--data", type=Path, default=Path("cifar-10-batches-bin"))
    parser.add_argument("--pixels", type=int, default=224, help="rows and columns of an image")
    return deepspeed.add_config_arguments(parser).parse_args()


def main() -> None:
    args = arguments()
    deepspeed.init_distributed()
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(args.seed)
    deepspeed.runtime.utils.set_random_seed(args.seed)

    net = PipelineModule(
        layers=joined(AlexNet(classes=10)),
        loss_fn=nn.CrossEntropyLoss(),
        num_stages=args.pipeline_parallel_size,
        partition_method="parameters",
        activation_checkpoint_interval=0,
    )
    engine, _, _, _ = deepspeed.initialize(
        args=args,
        model=net,
        model_parameters=[parameter for parameter in net.parameters() if parameter.requires_grad],
        training_data=Images(args.data, args.pixels),
    )
    for _ in range(args.steps):
        engine.train_batch()
    engine.destroy()


if __name__ == "__main__":
    main()
