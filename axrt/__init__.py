"""axrt: an asynchronous, message-driven runtime for training large neural networks."""

from axrt.config import Config
from axrt.engine import Engine, initialize
from axrt.errors import AxrtError, ConfigError, DataError, LaunchError, NonFiniteLossError, PeerLeftError
from axrt.model import LayerSpec, PipelineModule, TiedLayerSpec, seed_of
from axrt.results import EvalResult, StepResult

__all__ = [
    "AxrtError",
    "Config",
    "ConfigError",
    "DataError",
    "Engine",
    "EvalResult",
    "LaunchError",
    "LayerSpec",
    "NonFiniteLossError",
    "PeerLeftError",
    "PipelineModule",
    "StepResult",
    "TiedLayerSpec",
    "initialize",
    "seed_of",
]
