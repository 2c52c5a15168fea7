"""The model as a pipeline sees it: layers, how they are built and seeded, and how they are cut into
stages."""

from .deferral import defer_weight_gradient
from .layers import LayerSpec, TiedLayerSpec
from .module import PipelineModule
from .seeds import seed_of

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec", "defer_weight_gradient", "seed_of"]
