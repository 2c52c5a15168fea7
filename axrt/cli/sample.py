"""A microbatch as the data has them."""

import torch
from torch import Tensor

from axrt.config import Config


def sample_of(config: Config) -> tuple[Tensor, Tensor]:
    """A microbatch of the shape that the data has, of random tokens."""
    model = config.model
    rows = torch.randint(
        model.vocab,
        (config.schedule.microbatch_size, model.context + 1),
        generator=torch.Generator().manual_seed(0),
    )
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
