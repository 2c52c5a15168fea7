"""DeepSpeed's names for scripts that train a pipeline with it: only their imports change.

    import axrt.deepspeed as deepspeed
    from axrt.deepspeed.pipe import PipelineModule
    from axrt.deepspeed.utils import RepeatingLoader

Modules here have DeepSpeed's names, since scripts import them. What a script asks for is done by
axrt's own engine; what has no counterpart is refused by its name.
"""

from typing import NoReturn

from . import accelerator, pipe, runtime, utils
from .arguments import add_config_arguments
from .engine import PipelineEngine
from .pipe import LayerSpec, PipelineModule, TiedLayerSpec
from .process_group import init_distributed
from .start import initialize

__all__ = [
    "LayerSpec",
    "PipelineEngine",
    "PipelineModule",
    "TiedLayerSpec",
    "accelerator",
    "add_config_arguments",
    "init_distributed",
    "initialize",
    "pipe",
    "runtime",
    "utils",
]


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(f"axrt.deepspeed has no {name}; it has {', '.join(__all__)}")
