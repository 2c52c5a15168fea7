"""The tables of docs/study.md, simulated; see scripts/study_schedules."""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import click

from axrt.scheduler.recompute import recomputed_shares
from axrt.scheduler.schedules import build_schedule
from axrt.scheduler.simulator import Costs, Edge, Work, simulate
from axrt.scheduler.timeline import Timeline

POLICIES = (
    *(
        "gpipe",
        "1f1b",
        "axonn",
        "eager-1f1b",
        "merak",
        "varuna",
        "chimera",
        "breadth-first",
        "interleaved-1f1b",
        "zb-h1",
        "interleaved-zb",
    ),
    *("v-min", "v-half", "zb-h2", "dualpipe", "dualpipe-v", "zb-v", "adaptive"),
)
RECOMPUTING = ("gpipe", "1f1b", "eager-1f1b", "merak", "varuna", "zb-h1", "zb-v")
STEPS, SEEDS = 8, 5
GPT = Work(1.0, 1.26, 0.78)  # what scripts/bench_backward finds for a block, in forwards
CONDITIONS: dict[str, tuple[dict[str, Any], bool]] = {
    "steady": ({}, False),
    "jitter 0.2": ({"jitter": 0.2}, False),
    "jitter 0.5": ({"jitter": 0.5}, False),
    "one rank 1.3x": ({"stragglers": {2: 1.3}}, False),
    "3 % of 6x": ({"hiccups": (0.03, 6.0)}, False),
    "latency 0.25": ({"edge": Edge(latency=0.25)}, False),
    "latency 1": ({"edge": Edge(latency=1.0)}, False),
    "GPT": ({"work": GPT, "edge": Edge(latency=0.02), "task": 0.01, "jitter": 0.1}, False),
    "clip": ({}, True),
    "clip, jitter 0.5": ({"jitter": 0.5}, True),
}


def rows(ranks: int) -> list[tuple[str, str, int]]:
    """Label, policy, cap."""
    more = [
        (f"{name}, {times}p held", name, times * ranks)
        for name in ("dualpipe-v", "adaptive")
        for times in (3, 4)
    ]
    return [(name, name, 0) for name in POLICIES] + more


def ran(
    name: str, cap: int, ranks: int, costs: Costs, steps: int = 1, clips: bool = False
) -> Timeline:
    job = replace(
        build_schedule(name, ranks, 2 * ranks, max_held=cap),
        votes=clips,
        recomputed=dict.fromkeys(costs.recomputed, 1),
    )
    return simulate(job, costs, steps=steps)


def published(ranks: int) -> None:
    """One step on a steady machine, with and without latency."""
    print(
        "| policy | makespan | largest span | with latency 0.25 | in flight | held "
        "|\n|---|---|---|---|---|---|"
    )
    for label, name, cap in rows(ranks):
        line, far = (
            ran(name, cap, ranks, Costs()),
            ran(name, cap, ranks, Costs(edge=Edge(latency=0.25))),
        )
        share = build_schedule(name, ranks, 2 * ranks, max_held=cap).placement.share
        stash = f"{max(line.in_flight) * share:g} | {max(line.held) * share:g}"
        print(
            f"| {label} | {line.makespan:g} | {max(line.span):g} | {far.makespan:g} | {stash} |",
            flush=True,
        )


def utilisation(name: str, cap: int, ranks: int, costs: dict[str, Any], clips: bool) -> float:
    """The median over seeds, where anything varies."""
    seeds = SEEDS if "jitter" in costs or "hiccups" in costs else 1
    return statistics.median(
        ran(name, cap, ranks, Costs(seed=seed, **costs), STEPS, clips).utilisation
        for seed in range(seeds)
    )


def varied(ranks: int) -> None:
    """Eight steps, where machines are not steady; then what adaptive gains."""
    print("| policy | " + " | ".join(CONDITIONS) + " |\n|---|" + "---|" * len(CONDITIONS))
    found: dict[str, list[float]] = {}
    for label, name, cap in rows(ranks):
        found[label] = [
            utilisation(name, cap, ranks, costs, clips) for costs, clips in CONDITIONS.values()
        ]
        print(
            f"| {label} | " + " | ".join(f"{value:.3f}" for value in found[label]) + " |",
            flush=True,
        )
    print(
        "\n| adaptive against | " + " | ".join(CONDITIONS) + " |\n|---|" + "---|" * len(CONDITIONS)
    )
    for label in POLICIES[:-1]:
        gains = [
            100 * (mine / its - 1)
            for mine, its in zip(found["adaptive"], found[label], strict=True)
        ]
        print(f"| {label} | " + " | ".join(f"{gain:+.1f} %" for gain in gains) + " |")


def speed(ranks: int) -> None:
    """How fast the simulator itself is, on one core."""
    print("| policy | tasks | tasks a second |\n|---|---|---|")
    for name in POLICIES:
        began = time.perf_counter()
        tasks = ran(name, 0, ranks, Costs(), steps=4).tasks
        print(f"| {name} | {tasks:,} | {tasks / (time.perf_counter() - began):,.0f} |")


def recomputed(ranks: int) -> None:
    """Eight steps in which every forward whose stage holds more than one microbatch runs again."""
    shown = {name: CONDITIONS[name] for name in ("steady", "jitter 0.5", "latency 0.25")}
    print("| policy | " + " | ".join(shown) + " |\n|---|" + "---|" * len(shown))
    for name in RECOMPUTING:
        job = build_schedule(name, ranks, 2 * ranks)
        again = recomputed_shares(job.policy, job.placement, job.microbatches)
        values = [
            utilisation(name, 0, ranks, {**costs, "recomputed": again}, clips)
            for costs, clips in shown.values()
        ]
        print(f"| {name} | " + " | ".join(f"{value:.3f}" for value in values) + " |", flush=True)


TABLES: dict[str, Callable[[int], None]] = {
    "published": published,
    "varied": varied,
    "recomputed": recomputed,
    "speed": speed,
}


@click.command()
@click.option(
    "--ranks",
    default=(4, 8, 16),
    multiple=True,
    type=click.IntRange(3),
    help="with twice as many microbatches; may be given again",
)
@click.option(
    "--table",
    "wanted",
    default=("published", "varied", "recomputed"),
    multiple=True,
    type=click.Choice(list(TABLES)),
    help="which; may be given again",
)
def main(ranks: tuple[int, ...], wanted: tuple[str, ...]) -> None:
    """Print the tables for each number of ranks."""
    for name in wanted:
        for count in ranks:
            print(f"\n{name}: p = {count}, m = {2 * count}\n")
            TABLES[name](count)


if __name__ == "__main__":
    main()
