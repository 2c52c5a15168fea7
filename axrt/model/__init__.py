"""The model as a pipeline sees it: layers, how they are built and seeded, and how they are cut into
stages."""

from .deferral import defer_weight_gradient
from .in_pieces import InPieces
from .joints import Gathered, Sum
from .layers import LayerSpec, TiedLayerSpec
from .module import PipelineModule
from .seeds import seed_of
from .vocabulary import cross_entropy, masked_cross_entropy

__all__ = [
    "Gathered",
    "InPieces",
    "LayerSpec",
    "PipelineModule",
    "Sum",
    "TiedLayerSpec",
    "cross_entropy",
    "defer_weight_gradient",
    "masked_cross_entropy",
    "seed_of",
]
