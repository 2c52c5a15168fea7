"""AlexNet (Krizhevsky 2014, one tower) as a list of layers, the example that many first meet
pipelines with."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from axrt.model import LayerSpec, PipelineModule
from axrt.model.layers import Layer

_POOLED = 6  # rows and columns that are left for the classifier, whatever the size of an image


def alexnet(classes: int = 10, dropout: float = 0.5) -> PipelineModule:
    """The model; images have the shape (batch, 3, rows, columns), 63 rows and columns at least, and
    targets (batch,), int64.

    Args:
        dropout: probability, 0 to 1.
    """
    features: list[Layer] = [
        *(LayerSpec(nn.Conv2d, 3, 64, 11, stride=4, padding=2), _relu, _pool),
        *(LayerSpec(nn.Conv2d, 64, 192, 5, padding=2), _relu, _pool),
        *(LayerSpec(nn.Conv2d, 192, 384, 3, padding=1), _relu),
        *(LayerSpec(nn.Conv2d, 384, 256, 3, padding=1), _relu),
        *(LayerSpec(nn.Conv2d, 256, 256, 3, padding=1), _relu, _pool),
        LayerSpec(nn.AdaptiveAvgPool2d, _POOLED),
    ]
    classifier: list[Layer] = [
        *(_flat, LayerSpec(nn.Dropout, dropout)),
        *(LayerSpec(nn.Linear, 256 * _POOLED * _POOLED, 4096), _relu),
        *(LayerSpec(nn.Dropout, dropout), LayerSpec(nn.Linear, 4096, 4096), _relu),
        LayerSpec(nn.Linear, 4096, classes),
    ]
    return PipelineModule(
        [*features, *classifier], functional.cross_entropy, partition_method="parameters"
    )


def _relu(features: Tensor) -> Tensor:
    return functional.relu(features)


def _pool(features: Tensor) -> Tensor:
    return functional.max_pool2d(features, 3, stride=2)


def _flat(features: Tensor) -> Tensor:
    return torch.flatten(features, 1)
