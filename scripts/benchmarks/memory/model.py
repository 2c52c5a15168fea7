"""What all contestants train: axrt's own GPT, AdamW, and the same microbatches in every step, so
that losses fall fast and differ soon where something else is trained."""

from collections.abc import Iterable, Iterator
from itertools import cycle
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from axrt.config import Config
from axrt.model import PipelineModule
from axrt.models.gpt import gpt

_MIB = 1 << 20
Batch = tuple[Tensor, Tensor]


class Sizes(NamedTuple):
    """The sizes of a run.

    Args:
        layers, width, context: of the GPT.
        microbatches: of a step, of all replicas together.
        sequences: of a microbatch.
        steps: steps that are timed.
    """

    layers: int
    width: int
    context: int
    microbatches: int
    sequences: int
    steps: int

    @property
    def label(self) -> str:
        """The name of the model."""
        return f"{self.layers} x {self.width}"

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.microbatches * self.sequences * self.context

    @property
    def block_parameters(self) -> int:
        """Parameters of a block. It is the unit in which every runtime gathers and reduces."""
        return 12 * self.width**2 + 2 * self.width

    @property
    def block_mb(self) -> float:
        """MiB of a block in float32, with room for the gaps between parameters."""
        return 4.1 * self.block_parameters / _MIB

    @property
    def tiny(self) -> "Sizes":
        """Sizes of a rehearsal, which loads all code."""
        return self._replace(width=16, context=16, sequences=1)


REGULAR = Sizes(8, 256, context=64, microbatches=8, sequences=2, steps=4)
LARGE = Sizes(8, 1024, context=64, microbatches=4, sequences=1, steps=2)
QUICK = Sizes(2, 32, context=16, microbatches=4, sequences=1, steps=2)
VOCAB = 256


def config_of(sizes: Sizes, overrides: Iterable[str] = ()) -> Config:
    """The configuration of a run on one rank, with overrides laid over it."""
    sections = {
        "model": {
            "layers": sizes.layers,
            "width": sizes.width,
            "heads": 4,
            "context": sizes.context,
            "vocab": VOCAB,
        },
        "schedule": {
            "policy": "1f1b",
            "microbatches": sizes.microbatches,
            "microbatch_size": sizes.sequences,
        },
        "memory": {"bucket_mb": sizes.block_mb},
        "run": {"device": "cpu"},
    }
    return Config.read(sections, list(overrides))


def model_of(sizes: Sizes) -> PipelineModule:
    """The model as axrt takes it, without weights."""
    return gpt(config_of(sizes))


def layers_of(sizes: Sizes) -> nn.Sequential:
    """The whole model with its weights, which are those that axrt begins with."""
    return model_of(sizes).sequential(0)


def num_parameters(sizes: Sizes) -> int:
    """Parameters of the whole model."""
    ends = 2 * VOCAB * sizes.width + sizes.width
    return sizes.layers * sizes.block_parameters + ends


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, **adamw_options())


def adamw_options() -> dict[str, Any]:
    """The arguments of AdamW, for runtimes that make it themselves."""
    return {"lr": 1e-3, "fused": True}


def batches_of(sizes: Sizes, replica: int, replicas: int) -> Iterator[Batch]:
    """The microbatches of a replica, the same ones in every step, without end."""
    generator = torch.Generator().manual_seed(0)
    shape = (sizes.microbatches, sizes.sequences, sizes.context + 1)
    rows = torch.randint(VOCAB, shape, generator=generator)
    share = sizes.microbatches // replicas
    mine = rows[replica * share : (replica + 1) * share]
    return cycle([(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in mine])
