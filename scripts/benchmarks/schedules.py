"""The tables of docs/study.md, simulated; see scripts/study_schedules."""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import click

from axrt.scheduler.job import Job
from axrt.scheduler.placement import placement_by_name
from axrt.scheduler.planning.longest import Kept
from axrt.scheduler.planning.plan_choice import job_along_plan
from axrt.scheduler.planning.planner import PLACEMENTS, Effort, World, planned, worlds
from axrt.scheduler.planning.recompute import recomputed_shares
from axrt.scheduler.policies import Fixed
from axrt.scheduler.simulation.costs import Costs, Edge, Work
from axrt.scheduler.simulation.schedules import Option, build_schedule, options
from axrt.scheduler.simulation.simulator import order_of, simulate
from axrt.scheduler.simulation.timeline import Timeline

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
_HELD = (1.0, 1.5, 2.0)  # what ranks may hold, in microbatches a rank
_SLACK = 1e-9
EFFORT = Effort(moves=20)
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


def beaten(ranks: int) -> None:
    """Eight steps: the best policy of one pipe beside adaptive along a plan, for what ranks may
    hold; the last line says how far ahead any policy is. A plan is searched for a tenth as long as
    in a run."""
    print(
        "| world | held | best policy | its utilisation | adaptive along a plan | placement | "
        "ahead |\n|---|---|---|---|---|---|---|"
    )
    worst = 0.0
    with ProcessPoolExecutor() as pool:
        for of_world in pool.map(partial(_beaten_in, ranks), CONDITIONS):
            for row, ahead in of_world:
                worst = max(worst, ahead)
                print(row, flush=True)
    print(f"\nThe furthest that any policy is ahead: {100 * worst:.2f} %")


def _beaten_in(ranks: int, world: str) -> list[tuple[str, float]]:
    """The rows of a world, and by how much the best policy is ahead."""
    found = []
    costs, clips = CONDITIONS[world]
    others = list(_of_all(ranks, costs, clips))
    for times in _HELD:
        fits = (one for one in others if one[1] <= times * ranks + _SLACK)
        best, _, name, cap = max(fits)
        job = _along_a_plan(ranks, costs, clips, times * ranks)
        mine = _median(job, costs, clips)[0]
        label = f"{name}, {cap} chunks" if cap else name
        row = (
            f"| {world} | {times:g}p | {label} | {best:.3f} | {mine:.3f} | "
            f"{job.placement.name} | {100 * (mine / best - 1):+.1f} % |"
        )
        found.append((row, best / mine - 1))
    return found


def _of_all(
    ranks: int, costs: dict[str, Any], clips: bool
) -> Iterator[tuple[float, float, str, int]]:
    """Utilisation, microbatches held, name and cap of every policy with one pipe."""
    full = [int(2 * times * ranks) - less for times in _HELD for less in range(3)]
    for option in _with_one_pipe(ranks, 2 * ranks, full):
        yield *_median(option.job, costs, clips), option.name, option.max_held


def _with_one_pipe(ranks: int, microbatches: int, caps: Iterable[int]) -> Iterator[Option]:
    """Every policy with one pipe; those whose cap is free with these, too, in chunks of half a
    rank."""
    known = [one for one in options(ranks, microbatches, thorough=True) if one.job.pipes == 1]
    yield from known
    tried = {(one.name, one.max_held) for one in known}
    for name in ("adaptive", "dualpipe-v"):
        for cap in caps:
            if (name, cap) not in tried:
                with suppress(ValueError):  # less than it needs
                    job = build_schedule(name, ranks, microbatches, max_held=cap)
                    yield Option(name, cap, job)


def _along_a_plan(ranks: int, costs: dict[str, Any], clips: bool, limit: float) -> Job:
    among = worlds(ranks, Costs(**costs))
    return job_along_plan(
        among, 2 * ranks, limit, lambda job: replace(job, votes=clips), effort=Effort(moves=20)
    )


def _median(job: Job, costs: dict[str, Any], clips: bool) -> tuple[float, float]:
    seeds = SEEDS if "jitter" in costs or "hiccups" in costs else 1
    lines = [
        simulate(replace(job, votes=clips), Costs(seed=seed, **costs), steps=STEPS)
        for seed in range(seeds)
    ]
    held = max(max(line.held) for line in lines) * job.placement.share
    return statistics.median(line.utilisation for line in lines), round(held, 9)


# by (ranks, held), at latency 1: proved by a solver, tests/scheduler/test_planner.py
_OPTIMA = {(3, 3): 28, (3, 4): 25, (3, 6): 22, (4, 4): 39, (4, 6): 33, (4, 8): 30}
_OPTIMA |= {(8, 8): 83, (8, 12): 71, (8, 16): 62}


def planning(ranks: int) -> None:
    """How long one step of a plan takes at latency 1 beside the best policy, and the CPU time of
    making it, twice: for a step of twice as many microbatches as ranks, and for eight times as
    many."""
    print(
        "| m | held | proved optimum | best policy | its step | plan | placement | CPU, s "
        "|\n|---|---|---|---|---|---|---|---|"
    )
    costs = Costs(edge=Edge(1.0), pieces=1)
    for times in (2, 8):
        microbatches = times * ranks
        others = [
            (line.makespan, one.name, max(line.held) * one.job.placement.share)
            for one in _with_one_pipe(ranks, microbatches, range(2 * ranks, 4 * ranks + 1))
            for line in [simulate(one.job, costs)]
        ]
        for held in (ranks, 3 * ranks // 2, 2 * ranks):
            its, name, _ = min(one for one in others if one[2] <= held + _SLACK)
            began = time.process_time()
            plan = planned(worlds(ranks, costs), microbatches, held)
            took = time.process_time() - began
            optimum = _OPTIMA.get((ranks, held), "") if times == 2 else ""
            print(
                f"| {microbatches} | {held} | {optimum} | {name} | {its:g} | {plan.takes:g} | "
                f"{plan.order.placement.name} | {took:.1f} |",
                flush=True,
            )


class _Published(NamedTuple):
    """A row of Table 5 of the zero-bubble paper, with its costs of Table 6 in milliseconds.

    Args:
        microbatches: number of a step; there are 8 ranks.
        work, latency: costs of a microbatch on a rank, and of a message.
        hidden, heads: width of the model and number of its attention heads; sequences have 1,024
            tokens.
        rates: bubble rates of 1F1B, ZB-H1, ZB-H2, ZB-1p and ZB-2p.
    """

    microbatches: int
    work: Work
    latency: float
    hidden: int
    heads: int
    rates: tuple[float, ...]

    def kept(self, share: float) -> Kept:
        """Bytes of a chunk: 34 h + 5 a s a token, of which 32 h stay until the weight gradient."""
        until_input = 2 * self.hidden + 5 * self.heads * 1024
        return Kept(share * until_input, share * 32 * self.hidden)


# Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, Tables 5 and 6
_PUBLISHED = (
    _Published(
        24, Work(18.522, 18.086, 9.337), 0.601, 2304, 24, (0.2431, 0.1585, 0.1083, 0.1585, 0.0433)
    ),
    _Published(
        32, Work(18.513, 18.086, 9.331), 0.626, 2304, 24, (0.1985, 0.1242, 0.0837, 0.1242, 0.0039)
    ),
    _Published(
        64, Work(18.546, 18.097, 9.321), 0.762, 2304, 24, (0.1240, 0.0674, 0.0444, 0.0674, 0.0026)
    ),
    _Published(
        24, Work(29.718, 29.444, 19.927), 0.527, 4096, 32, (0.2347, 0.1323, 0.0698, 0.1323, 0.0029)
    ),
    _Published(
        32, Work(29.802, 29.428, 19.530), 0.577, 4096, 32, (0.1898, 0.1045, 0.0559, 0.1045, 0.0022)
    ),
    _Published(
        64, Work(29.935, 29.621, 19.388), 0.535, 4096, 32, (0.1091, 0.0554, 0.0294, 0.0554, 0.0010)
    ),
)


def zero_bubble(ranks: int) -> None:
    """Idle shares of the longest span of a step, beside those of the zero-bubble paper."""
    if ranks != 8:
        print("The paper has 8 ranks.")
        return
    along = {  # what a rank may keep, in microbatches, and on which placements
        "zb-h1": (ranks, ("linear",)),
        "zb-h2": (2 * ranks - 1, ("linear",)),
        "adaptive, p": (ranks, PLACEMENTS),
        "adaptive, 2p": (2 * ranks, PLACEMENTS),
    }
    print("| m | F | pieces | 1f1b | " + " | ".join(along) + " |\n|---|---|---|---|" + "---|" * 4)
    for row in _PUBLISHED:
        for pieces in (1, 4):
            costs = Costs(row.work, edge=Edge(row.latency), pieces=pieces)
            plain = build_schedule("1f1b", ranks, row.microbatches)
            idle = [_idle(plain, row, costs)]
            for held, placements in along.values():
                found = [placement_by_name(name, ranks, 0) for name in placements]
                among = [
                    World(where, costs, (row.kept(where.share),) * where.stages) for where in found
                ]
                limit = held * sum(row.kept(1.0))
                idle.append(
                    _idle(
                        job_along_plan(among, row.microbatches, limit, effort=Effort(moves=20)),
                        row,
                        costs,
                    )
                )
            cells = [f"{mine:.4f} ({its:.4f})" for mine, its in zip(idle, row.rates, strict=True)]
            print(
                f"| {row.microbatches} | {row.work.forward} | {pieces} | {' | '.join(cells)} |",
                flush=True,
            )
    print("\nIn brackets what the paper has: 1F1B, ZB-H1, ZB-H2, ZB-1p, ZB-2p.")


def _idle(job: Job, row: _Published, costs: Costs) -> float:
    span = max(simulate(job, costs).span)
    return (span - row.microbatches * sum(row.work[:3])) / span


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


def places(ranks: int) -> None:
    """The rate of zb-v, whose weight gradients go wherever there is time, as a share of that of its
    order followed strictly."""
    jitters = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
    print("| pieces | " + " | ".join(f"jitter {one:g}" for one in jitters) + " |")
    print("|---|" + "---|" * len(jitters))
    loose = build_schedule("zb-v", ranks, 2 * ranks)
    order = order_of(loose)
    strict = replace(loose, policy=Fixed(order, order.needs))
    for pieces in (1, 2, 4, 8):
        costs = {"edge": Edge(0.02), "pieces": pieces}
        took = [
            [_median(job, {**costs, "jitter": one}, False)[0] for job in (loose, strict)]
            for one in jitters
        ]
        print(f"| {pieces} | " + " | ".join(f"{one / other:.3f}" for one, other in took) + " |")


TABLES: dict[str, Callable[[int], None]] = {
    "published": published,
    "varied": varied,
    "recomputed": recomputed,
    "places": places,
    "beaten": beaten,
    "planning": planning,
    "zero-bubble": zero_bubble,
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
