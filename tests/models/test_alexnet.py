"""AlexNet: the sizes of the paper, and the example on images of CIFAR-10's form."""

from pathlib import Path

import numpy as np
import pytest
import torch

from axrt.models.alexnet import alexnet

from ..mpi.mpirun import ROOT, mpirun

EXAMPLE = ROOT / "examples" / "alexnet_cifar10.py"


@pytest.mark.parametrize("pixels", [224, 64])
def test_it_has_the_parameters_and_the_outputs_of_the_published_model(pixels: int) -> None:
    """61,100,840 for 1000 classes, as torchvision documents of its AlexNet."""
    model = alexnet(classes=1000).sequential(0).eval()
    assert sum(p.numel() for p in model.parameters()) == 61_100_840
    assert model(torch.randn(1, 3, pixels, pixels)).shape == (1, 1000)


def trained(folder: Path, ranks: int, steps: int) -> list[float]:
    """The losses that the example tells, on images of a shade each."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 10, 64).astype(np.uint8)
    images = np.repeat(labels[:, None] * 25, 3072, axis=1).astype(np.uint8)
    rows = np.concatenate([labels[:, None], images], axis=1)
    (folder / "cifar-10-batches-bin").mkdir()
    rows.tofile(folder / "cifar-10-batches-bin" / "data_batch_1.bin")
    words = [str(EXAMPLE), "--steps", str(steps), "--microbatch-size", "4", "--pixels", "64"]
    ended = mpirun(ranks, words, cwd=folder)
    assert ended.code == 0, ended.err
    return [float(line.rpartition(" ")[2]) for line in ended.out.splitlines() if "loss" in line]


def test_the_example_begins_at_chance_on_two_replicas(tmp_path: Path) -> None:
    assert trained(tmp_path, 2, 1) == [pytest.approx(np.log(10), rel=0.05)]


@pytest.mark.long
def test_the_example_learns_on_two_replicas_of_two_stages(tmp_path: Path) -> None:
    assert trained(tmp_path, 4, 12)[-1] < 2.3, "less than by chance"


def test_where_there_are_no_images_it_says_how_to_get_them(tmp_path: Path) -> None:
    ended = mpirun(1, [str(EXAMPLE)], cwd=tmp_path)
    assert ended.code != 0
    assert "wget https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz" in ended.err
