"""`deepspeed.runtime`."""

from . import pipe, utils

__all__ = ["pipe", "utils"]
