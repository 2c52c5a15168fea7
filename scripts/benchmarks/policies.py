"""A GPT under every policy, on the ranks of one job; see scripts/bench_policies.

Every policy has an engine of its own with the same weights; they train a step in turn, in an order
drawn anew for each round. A figure is the median over the rounds of a ratio within the round, with
the extremes.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import click
import torch
from mpi4py import MPI
from torch import Tensor

import axrt
from axrt.config import Config
from axrt.device.allocator import keep_freed_memory
from axrt.errors import ConfigError
from axrt.models.gpt import gpt
from axrt.scheduler.policies import NAMES
from axrt.transport.mpi import MpiTransport

CONTEXT, MICROBATCHES, SEQUENCES = 256, 8, 4
TOKENS = CONTEXT * MICROBATCHES * SEQUENCES
BASE = "1f1b"


def engines(
    ranks: int, width: int, weights: str, only: Sequence[str]
) -> Iterator[tuple[str, axrt.Engine]]:
    wanted = [(name, name, 0) for name in NAMES if not only or name in {BASE, *only}]
    if not only:
        wanted.append((f"adaptive, {3 * ranks} held", "adaptive", 3 * ranks))
    for label, name, cap in wanted:
        config = Config.read(
            {
                "model": {"layers": 8, "width": width, "heads": 4, "context": CONTEXT},
                "schedule": {
                    "policy": name,
                    "max_held": cap,
                    "microbatches": MICROBATCHES,
                    "microbatch_size": SEQUENCES,
                },
                "precision": {"weights": weights},
                "run": {"device": "cpu"},
            }
        )
        try:
            yield (
                label,
                axrt.initialize(
                    gpt(config), config=config, transport=MpiTransport(MPI.COMM_WORLD.Dup())
                ),
            )
        except ConfigError as error:
            if MPI.COMM_WORLD.rank == 0:
                print(f"left out: {label}: {error}")


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    while True:
        rows = torch.randint(256, (SEQUENCES, CONTEXT + 1), generator=generator)
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def step_s(engine: axrt.Engine, stream: Any) -> float:
    MPI.COMM_WORLD.Barrier()
    began = time.perf_counter()
    engine.train_batch(stream if engine.reads else None)
    MPI.COMM_WORLD.Barrier()
    return time.perf_counter() - began


@click.command()
@click.option("--rounds", default=9, show_default=True, type=click.IntRange(1))
@click.option(
    "--width",
    default=256,
    show_default=True,
    type=click.IntRange(8),
    help="of the model; a multiple of 8. Cores without bfloat16 products want 64 there",
)
@click.option("--weights", default="float32", show_default=True, help="precision.weights")
@click.option("--policy", "only", multiple=True, help=f"some policies beside {BASE}, not all")
def main(rounds: int, width: int, weights: str, only: Sequence[str]) -> None:
    """Time a step under every policy."""
    torch.set_num_threads(1)
    keep_freed_memory()
    made, stream, random = (
        dict(engines(MPI.COMM_WORLD.size, width, weights, only)),
        batches(),
        Random(0),
    )
    taken: dict[str, list[float]] = {label: [] for label in made}
    for number in range(rounds + 1):
        order = list(made)
        random.shuffle(order)
        for label in order:
            took_s = step_s(made[label], stream)
            if number:  # the first round warms up
                taken[label].append(took_s)
    if MPI.COMM_WORLD.rank == 0:
        print(
            f"GPT 8 x {width} in {weights}, {MPI.COMM_WORLD.size} ranks of one thread, "
            f"{MICROBATCHES} microbatches of {SEQUENCES} x {CONTEXT} tokens:\n"
        )
        print(f"| policy | tokens/s | against {BASE} in the same round |\n|---|---|---|")
        for label, seconds in sorted(taken.items(), key=lambda item: statistics.median(item[1])):
            ratios = [base / mine for base, mine in zip(taken[BASE], seconds, strict=True)]
            rate = TOKENS / statistics.median(seconds)
            print(
                f"| {label} | {rate:,.0f} | {statistics.median(ratios):.3f} ({min(ratios):.3f} to "
                f"{max(ratios):.3f}) |"
            )
    for engine in made.values():
        engine.close()


if __name__ == "__main__":
    main()
