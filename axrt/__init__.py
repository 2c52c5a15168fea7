"""axrt: an asynchronous, message-driven runtime for training large neural networks.

Names are imported when they are first used: `axrt simulate` and `axrt --help` need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
        ScratchError,
    )
    from axrt.generation.loading import load
    from axrt.model import (
        Gathered,
        InPieces,
        LayerSpec,
        PipelineModule,
        Sum,
        TiedLayerSpec,
        cross_entropy,
        defer_weight_gradient,
        masked_cross_entropy,
        seed_of,
    )
    from axrt.results import EvalResult, StepResult
    from axrt.tracing.traced import traced

__all__ = [
    "AxrtError",
    "Config",
    "ConfigError",
    "DamagedError",
    "DataError",
    "Engine",
    "EvalResult",
    "Gathered",
    "InPieces",
    "LaunchError",
    "LayerSpec",
    "ModelError",
    "NonFiniteLossError",
    "PeerLeftError",
    "PeerLostError",
    "PipelineModule",
    "SaveError",
    "ScratchError",
    "StepResult",
    "Sum",
    "TiedLayerSpec",
    "cross_entropy",
    "defer_weight_gradient",
    "initialize",
    "load",
    "masked_cross_entropy",
    "seed_of",
    "traced",
]

# the lightest first
_HOMES = (
    "axrt.config",
    "axrt.errors",
    "axrt.engine",
    "axrt.model",
    "axrt.generation.loading",
    "axrt.results",
    "axrt.tracing.traced",
)


def __getattr__(name: str) -> Any:
    if name in __all__:
        for home in _HOMES:
            if hasattr(module := import_module(home), name):
                # Kept: layers of a team ask for `axrt.Gathered` in each of their pieces.
                return globals().setdefault(name, getattr(module, name))
    try:
        return import_module(f"axrt.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"axrt.{name}":
            raise
    raise AttributeError(f"module 'axrt' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
