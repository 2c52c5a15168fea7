"""`deepspeed.runtime.utils`."""

import random

import numpy as np
import torch


def set_random_seed(seed: int) -> None:
    """Seed Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
