"""The settings of a run, section by section."""

from .checkpoint import Checkpoint
from .config import Config, described
from .data import Data
from .memory import Memory
from .model import Model
from .optimizer import Optimizer
from .parallel import Parallel
from .precision import Precision
from .run import Run
from .schedule import AUTO, DEFAULTS, Schedule

__all__ = [
    "AUTO",
    "DEFAULTS",
    "Checkpoint",
    "Config",
    "Data",
    "Memory",
    "Model",
    "Optimizer",
    "Parallel",
    "Precision",
    "Run",
    "Schedule",
    "described",
]
