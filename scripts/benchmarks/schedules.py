"""The tables of docs/schedules.md, simulated; see scripts/study_schedules."""

import statistics
from typing import Any

import click

from axrt.scheduler.policies import named, placement_for
from axrt.scheduler.simulator import Costs, Edge, simulate

POLICIES = ("gpipe", "1f1b", "axonn", "eager-1f1b", "breadth-first", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v", "adaptive")
STEPS, SEEDS = 8, 5
CONDITIONS: dict[str, tuple[dict[str, Any], bool]] = {
    "steady": ({}, False),
    "jitter 0.2": ({"jitter": 0.2}, False),
    "jitter 0.5": ({"jitter": 0.5}, False),
    "one rank 1.3x": ({"stragglers": {2: 1.3}}, False),
    "3 % of 6x": ({"hiccups": (0.03, 6.0)}, False),
    "latency 0.25": ({"edge": Edge(latency=0.25)}, False),
    "clip": ({}, True),
    "clip, jitter 0.5": ({"jitter": 0.5}, True),
}


def utilisation(name: str, ranks: int, microbatches: int, cap: int, costs: dict[str, Any], clips: bool) -> float:
    """The median over seeds, where anything varies."""
    policy = named(name, cap)
    placement = placement_for(policy, ranks, microbatches)
    seeds = SEEDS if "jitter" in costs or "hiccups" in costs else 1
    lines = [simulate(placement, policy, microbatches, Costs(seed=seed, **costs), steps=STEPS, clips=clips) for seed in range(seeds)]
    return statistics.median(line.utilisation for line in lines)


def table(ranks: int, microbatches: int) -> None:
    print(f"\np = {ranks}, m = {microbatches}\n\n| policy | " + " | ".join(CONDITIONS) + " |\n|---|" + "---|" * len(CONDITIONS))
    for name, cap, label in [(name, 0, name) for name in POLICIES] + [("adaptive", 3 * ranks, "adaptive, 3p held")]:
        row = [utilisation(name, ranks, microbatches, cap, costs, clips) for costs, clips in CONDITIONS.values()]
        print(f"| {label} | " + " | ".join(f"{value:.3f}" for value in row) + " |", flush=True)


@click.command()
@click.option("--ranks", default=(4, 8), multiple=True, type=click.IntRange(3), help="with twice as many microbatches; may be given again")
def main(ranks: tuple[int, ...]) -> None:
    """Print a table for each number of ranks."""
    for count in ranks:
        table(count, 2 * count)


if __name__ == "__main__":
    main()
