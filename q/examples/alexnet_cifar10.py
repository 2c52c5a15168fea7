"""AlexNet on CIFAR-10, with two replicas of a pipeline of two stages: the pipeline tutorial of
DeepSpeed told again.

    mpirun -n 4 python examples/alexnet_cifar10.py --data cifar-10-batches-bin
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

import axrt
from axrt.models.alexnet import alexnet

RECORD = 1 + 3 * 32 * 32  # a label, and an image as red, green and blue rows
LEAST_PIXELS = 63  # of which AlexNet's poolings leave one
HOW = """expected the binary version of CIFAR-10, 163 MB:
    wget https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz
    tar xzf cifar-10-binary.tar.gz            # makes cifar-10-batches-bin"""


def read(folder: Path) -> tuple[Tensor, Tensor]:
    """Images, uint8, shape (number, 3, 32, 32), and labels, int64, shape (number,)."""
    files = sorted(folder.glob("data_batch_*.bin"))
    if not files:
        sys.exit(f"{folder}: no data_batch_1.bin there; {HOW}")
    rows = np.concatenate([np.fromfile(file, np.uint8).reshape(-1, RECORD) for file in files])
    images = torch.from_numpy(rows[:, 1:]).reshape(-1, 3, 32, 32)
    return images, torch.from_numpy(rows[:, 0].astype(np.int64))


def microbatches(
    images: Tensor, labels: Tensor, size: int, pixels: int, replica: int, replicas: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Microbatches without end, another order each epoch; each replica has its own part."""
    epoch = 0
    while True:
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        mine = order[replica::replicas]
        for places in mine[: len(mine) // size * size].split(size):
            picked = images[places].float().div(127.5).sub(1)
            scaled = functional.interpolate(picked, (pixels, pixels), mode="bilinear")
            yield scaled, labels[places]
        epoch += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("cifar-10-batches-bin"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--microbatch-size", type=int, default=8)
    parser.add_argument("--pixels", type=int, default=224, help="rows and columns of an image")
    given = parser.parse_args()
    if given.pixels < LEAST_PIXELS:
        parser.error(f"--pixels {given.pixels}; expected at least {LEAST_PIXELS}: AlexNet pools")
    config = {
        "parallel": {"data": 2},  # replicas; the other ranks are the stages of each
        "schedule": {"microbatches": 4, "microbatch_size": given.microbatch_size},
        "optimizer": {"lr": 1e-3, "weight_decay": 3e-7},
        "run": {"seed": 1},
    }
    images, labels = read(given.data)
    with axrt.initialize(alexnet(classes=10), config=config) as engine:
        data = microbatches(
            images, labels, given.microbatch_size, given.pixels, engine.data_rank, engine.data_size
        )
        for step in range(given.steps):
            result = engine.train_batch(data)
            if engine.is_main and (step % 10 == 9 or step + 1 == given.steps):
                print(f"step {step + 1}/{given.steps}  loss {result.loss:.4f}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except axrt.ConfigError as error:  # without mpirun; in a job it has been said
        print(f"axrt: {error}", file=sys.stderr)
        sys.exit(2)
