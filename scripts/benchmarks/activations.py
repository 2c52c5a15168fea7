"""What slack is worth where its activations leave the device, on eight ranks of layers that sleep;
see scripts/bench_activations.

Every setting has an engine of its own; they train in turn, in an order drawn anew for each round.
A figure is the median over the rounds of a ratio within the round, with the extremes.
"""

import statistics
import time
from collections.abc import Iterator
from random import Random
from typing import Any, NamedTuple

import click
import torch
from mpi4py import MPI
from sleeping import LAYERS, RANK_S, RANKS, Sleeper
from torch import Tensor

import axrt
from axrt.observe.observer import Observer
from axrt.scheduler.task import Kind, Task
from axrt.transport.mpi import MpiTransport

MICROBATCHES = 16


class Setting(NamedTuple):
    """What a rank may hold, in chunks; 0 is the policy's own, and all of that on the device."""

    max_held: int
    on_device: int

    def __str__(self) -> str:
        held = self.max_held or 2 * RANKS
        return f"{held} held, {self.on_device or held} on the device"


SETTINGS = (Setting(0, 0), Setting(3 * RANKS, 0), Setting(3 * RANKS, 2 * RANKS))


class Keeper(Sleeper):
    """Keeps its output for its backward."""

    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value).sin()


class Copied(Observer):
    """Counts the stashes that left the device."""

    count = 0

    def finished(self, task: Task, began_s: float, ended_s: float) -> None:
        self.count += task.kind is Kind.OFFLOAD


def engine_of(setting: Setting, jitter: float, scratch: str, copied: Copied) -> axrt.Engine:
    layers = [
        axrt.LayerSpec(Keeper, RANK_S * RANKS / LAYERS, jitter, place) for place in range(LAYERS)
    ]
    config = {
        "schedule": {
            "policy": "adaptive",
            "max_held": setting.max_held,
            "microbatches": MICROBATCHES,
        },
        "memory": {"offload_activations": setting.on_device, "scratch": scratch},
        "run": {"device": "cpu"},
    }
    return axrt.initialize(
        axrt.PipelineModule(layers, lambda outputs, target: outputs.mean()),
        lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        config=config,
        transport=MpiTransport(MPI.COMM_WORLD.Dup()),
        observers=[copied],
    )


def batches(kib: int) -> Iterator[tuple[Tensor, Tensor]]:
    value = torch.zeros(kib, 256)
    while True:
        yield value, torch.zeros(1)


def taken_s(engine: axrt.Engine, stream: Any, steps: int) -> float:
    MPI.COMM_WORLD.Barrier()
    began = time.perf_counter()
    for _ in range(steps):
        engine.train_batch(stream if engine.reads else None)
    MPI.COMM_WORLD.Barrier()
    return time.perf_counter() - began


@click.command()
@click.option("--rounds", default=9, show_default=True, type=click.IntRange(1))
@click.option("--steps", default=4, show_default=True, type=click.IntRange(1), help="of a round")
@click.option("--jitter", default=0.5, show_default=True, help="sigma of a factor on every sleep")
@click.option("--kib", default=64, show_default=True, help="that a microbatch keeps on a stage")
@click.option("--scratch", default="host", show_default=True, help="memory.scratch")
def main(rounds: int, steps: int, jitter: float, kib: int, scratch: str) -> None:
    """Time steps under each setting."""
    torch.set_num_threads(1)
    counts = {setting: Copied() for setting in SETTINGS}
    made = {setting: engine_of(setting, jitter, scratch, counts[setting]) for setting in SETTINGS}
    taken: dict[Setting, list[float]] = {setting: [] for setting in SETTINGS}
    stream, random = batches(kib), Random(0)
    for number in range(rounds + 1):
        order = list(SETTINGS)
        random.shuffle(order)
        for setting in order:
            took_s = taken_s(made[setting], stream, steps)
            if number:  # the first round warms up
                taken[setting].append(took_s / steps)
    copied = {setting: MPI.COMM_WORLD.allreduce(of.count) for setting, of in counts.items()}
    if MPI.COMM_WORLD.rank == 0:
        print("| chunks of a rank | ms a step | time against the first | copied a step |")
        print("|---|---|---|---|")
        for setting, seconds in taken.items():
            ratios = [mine / own for mine, own in zip(seconds, taken[SETTINGS[0]], strict=True)]
            of_step = copied[setting] / (steps * (rounds + 1))
            print(
                f"| {setting} | {1e3 * statistics.median(seconds):.0f} | "
                f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) | "
                f"{of_step:.0f} |"
            )
    for engine in made.values():
        engine.close()


if __name__ == "__main__":
    main()
