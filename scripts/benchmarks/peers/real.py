"""Tokens a second of a GPT on two ranks of one thread, beside one process alone and two independent
ones at once."""

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from axrt.config import Config
from axrt.device.allocator import keep_freed_memory
from axrt.model import cross_entropy
from axrt.models.gpt import gpt

from . import of_axrt, of_deepspeed, of_torch
from .arena import in_turn, timed
from .contestant import Contestant

CONTEXT, WIDTH, VOCAB = 256, 256, 256
MICROBATCHES, SEQUENCES, STEPS = 8, 4, 5
TOKENS = CONTEXT * MICROBATCHES * SEQUENCES
SETTINGS: dict[str, Any] = {
    "model": {"layers": 8, "width": WIDTH, "heads": 4, "context": CONTEXT, "vocab": VOCAB},
    "schedule": {"microbatches": MICROBATCHES, "microbatch_size": SEQUENCES},
}
ALONE, BOTH = "one process alone", "two processes, each for itself"
_CUTS = {2: (0, 5, 10), 4: (0, 3, 5, 7, 10)}  # embedding, eight blocks, head


def run(rounds: int) -> list[dict[str, Any]]:
    """A row a contestant and round, on rank 0; every rank calls it."""
    keep_freed_memory()
    rows = []
    for number, contestant in in_turn(list(_contestants()), rounds):
        took = timed(contestant.step, STEPS if number else 1)
        tokens = STEPS * TOKENS * (2 if contestant.name == BOTH else 1)
        row = {
            "part": "real",
            "runtime": contestant.runtime,
            "name": contestant.name,
            "round": number,
        }
        rows.append(row | {"tokens_per_s": tokens / took.wall_s})
    return [row for row in rows if row["round"]] if dist.get_rank() == 0 else []


def _contestants() -> Iterator[Contestant]:
    model = gpt(Config.read(SETTINGS))
    yield of_axrt.by_default(gpt(Config.read(SETTINGS)), _microbatches(), SETTINGS, _of_named)
    for name, cap in (("adaptive", 0), ("adaptive", 6), ("zb-v", 0), ("1f1b", 0)):
        yield of_axrt.contestant(
            name, lambda stages: model, _microbatches(), SETTINGS, _of_named, cap
        )
    for name in of_torch.NAMES:
        yield of_torch.contestant(
            name, _stage_of, _examples_for(name), cross_entropy, _steps(), MICROBATCHES, _adamw
        )
    if of_deepspeed.is_installed():
        yield of_deepspeed.contestant(
            list(model.sequential(0)),
            cross_entropy,
            _microbatches(),
            MICROBATCHES,
            SEQUENCES,
            _adamw,
        )
    yield _plain(ALONE, runs=dist.get_rank() == 0)
    yield _plain(BOTH, runs=True)


def _plain(name: str, runs: bool) -> Contestant:
    """A loop of plain torch in this process alone."""
    model = gpt(Config.read(SETTINGS))
    layers, batches = model.sequential(0), _microbatches()
    optimizer = _adamw(list(layers.parameters()))

    def step() -> None:
        for _ in range(MICROBATCHES if runs else 0):
            inputs, target = next(batches)
            (cross_entropy(layers(inputs), target) / MICROBATCHES).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return Contestant(name, "plain torch", step, 2 * MICROBATCHES)


def _stage_of(stage: int, chunks: int) -> nn.Module:
    cuts = _CUTS[2 * chunks]
    return nn.Sequential(
        *list(gpt(Config.read(SETTINGS)).sequential(0))[cuts[stage] : cuts[stage + 1]]
    )


def _examples_for(name: str) -> Any:
    last = 2 * of_torch.chunks_of(name) - 1
    features = (SEQUENCES, CONTEXT, WIDTH)

    def examples(stage: int) -> tuple[Tensor, Tensor]:
        given = (
            torch.zeros(features, requires_grad=True)
            if stage
            else torch.zeros(features[:2], dtype=torch.int64)
        )
        return given, torch.zeros(
            (*features[:2], VOCAB) if stage == last else features, requires_grad=True
        )

    return examples


def _microbatches() -> Iterator[tuple[Tensor, Tensor]]:
    rows = torch.randint(
        VOCAB, (SEQUENCES, CONTEXT + 1), generator=torch.Generator().manual_seed(0)
    )
    return repeat((rows[:, :-1].contiguous(), rows[:, 1:].contiguous()))


def _steps() -> Iterator[tuple[Tensor, Tensor]]:
    inputs, target = next(_microbatches())
    return repeat((inputs.repeat(MICROBATCHES, 1), target.repeat(MICROBATCHES, 1)))


def _adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-4, fused=True)


def _of_named(named: Any) -> torch.optim.Optimizer:
    return _adamw([parameter for _, parameter in named])
