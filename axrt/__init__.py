"""axrt: an asynchronous, message-driven runtime for training large neural networks."""

from axrt.config import Config
from axrt.engine import Engine, initialize
from axrt.errors import (
    AxrtError,
    ConfigError,
    DamagedError,
    DataError,
    LaunchError,
    ModelError,
    NonFiniteLossError,
    PeerLeftError,
    PeerLostError,
    SaveError,
)
from axrt.model import LayerSpec, PipelineModule, TiedLayerSpec, defer_weight_gradient, seed_of
from axrt.results import EvalResult, StepResult

__all__ = [
    "AxrtError",
    "Config",
    "ConfigError",
    "DamagedError",
    "DataError",
    "Engine",
    "EvalResult",
    "LaunchError",
    "LayerSpec",
    "ModelError",
    "NonFiniteLossError",
    "PeerLeftError",
    "PeerLostError",
    "PipelineModule",
    "SaveError",
    "StepResult",
    "TiedLayerSpec",
    "defer_weight_gradient",
    "initialize",
    "seed_of",
]
