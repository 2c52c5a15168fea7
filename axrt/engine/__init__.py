"""What a user calls: the engine of a rank."""

from .engine import Engine
from .start import initialize

__all__ = ["Engine", "initialize"]
