"""Layers that run again, or activations that leave the device, on a GPT of two ranks; see
scripts/bench_recompute.

Every setting has an engine of its own; they train a step in turn, in an order drawn anew for each
round. A figure is the median over the rounds of a ratio within the round, with the extremes.
"""

import statistics
import time
from collections.abc import Sequence
from random import Random

import click
import torch
from mpi4py import MPI

import axrt
from axrt.config import Config
from axrt.models.gpt import gpt
from axrt.transport.mpi import MpiTransport

CONTEXT, MICROBATCHES, ROOMS = 256, 8, 3
CHOICES: Sequence[str | int] = ("none", 2, "full")  # of four layers a stage


def engine_of(recompute: str | int, gb_s: float) -> axrt.Engine:
    config = Config.read(
        {
            "model": {"layers": 8, "width": 256, "heads": 4, "context": CONTEXT},
            "schedule": {"policy": "gpipe", "microbatches": MICROBATCHES},
            "memory": {
                "offload_activations": ROOMS,
                "recompute": recompute,
                "scratch_gb_s": gb_s,
            },
            "run": {"device": "cpu"},
        }
    )
    transport = MpiTransport(MPI.COMM_WORLD.Dup())
    return axrt.initialize(gpt(config), config=config, transport=transport)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.arange(CONTEXT + 1).remainder(256).unsqueeze(0)
    return tokens[:, :-1], tokens[:, 1:]


def taken_s(engine: axrt.Engine) -> float:
    MPI.COMM_WORLD.Barrier()
    began = time.perf_counter()
    engine.train_batch(iter([batch()] * MICROBATCHES) if engine.reads else None)
    MPI.COMM_WORLD.Barrier()
    return time.perf_counter() - began


@click.command()
@click.option("--rounds", default=9, show_default=True, type=click.IntRange(1))
@click.option(
    "--gb-s",
    multiple=True,
    default=(0.05, 0.2, 0.8),
    show_default=True,
    help="bandwidth of scratch; may be given again",
)
def main(rounds: int, gb_s: Sequence[float]) -> None:
    """Time steps with each setting at each bandwidth."""
    torch.set_num_threads(1)
    if MPI.COMM_WORLD.rank == 0:
        print("| GB/s | memory.recompute | ms a step | time against `full` |\n|---|---|---|---|")
    for rate in gb_s:
        made = {choice: engine_of(choice, rate) for choice in CHOICES}
        taken: dict[str | int, list[float]] = {choice: [] for choice in CHOICES}
        random = Random(0)
        for number in range(rounds + 1):
            for choice in random.sample(CHOICES, len(CHOICES)):
                took_s = taken_s(made[choice])
                if number:  # the first round warms up
                    taken[choice].append(took_s)
        if MPI.COMM_WORLD.rank == 0:
            show(rate, taken)
        for engine in made.values():
            engine.close()


def show(rate: float, taken: dict[str | int, list[float]]) -> None:
    for choice, seconds in taken.items():
        ratios = [mine / full for mine, full in zip(seconds, taken["full"], strict=True)]
        print(
            f"| {rate:g} | `{choice}` | {1e3 * statistics.median(seconds):.0f} | "
            f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) |",
            flush=True,
        )


if __name__ == "__main__":
    main()
