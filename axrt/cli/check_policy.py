"""`axrt check-policy`: whether a policy of the user's own ever gets stuck, or holds more than it
says."""

import sys
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import click

from axrt.exit_codes import Exit
from axrt.scheduler.policies import policy_by_name
from axrt.scheduler.simulation.costs import Costs, Edge
from axrt.scheduler.simulation.schedules import (
    TRIED_STEPS,
    UnsoundPolicyError,
    build_schedule,
    fault_of,
)

_FOUND = 1  # as of every command that looks for faults
_CHUNKED = ("looped",)  # placements that leave the number of stages of a rank free


class _Case(NamedTuple):
    """A schedule and a world in which it is tried."""

    ranks: int
    microbatches: int
    placement: str
    chunks: int
    seed: int

    @property
    def costs(self) -> Costs:
        """Tasks and messages take random times."""
        return Costs(jitter=0.5 + self.seed % 2, edge=Edge(latency=self.seed % 3), seed=self.seed)

    def command(self, policy: str) -> str:
        """The command that shows the same world."""
        chunks = f" --chunks {self.chunks}" if self.chunks else ""
        latency = f" --latency {self.costs.edge.latency:g}" if self.costs.edge.latency else ""
        return (
            f"axrt simulate --policy {policy} --ranks {self.ranks} --microbatches "
            f"{self.microbatches} --placement {self.placement}{chunks} --steps {TRIED_STEPS} "
            f"--jitter {self.costs.jitter:g}{latency} world.seed={self.seed}"
        )


@click.command("check-policy", short_help="Try a policy of your own on many schedules.")
@click.argument("policy")
@click.option("--max-ranks", default=6, show_default=True, type=click.IntRange(1))
@click.option("--max-microbatches", default=12, show_default=True, type=click.IntRange(1))
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(1), help="of each case")
def check_policy(policy: str, max_ranks: int, max_microbatches: int, seeds: int) -> None:
    """Try POLICY, 'package.module:Class', on every placement that it names, with few and many ranks
    and microbatches, where tasks take random times. Whether it ever gets stuck cannot be shown for
    all cases that way: docs/schedules.md says how that is argued. Leaves with code 1 where it
    gets stuck, holds more than it says or raises an error.

    \b
    axrt check-policy my_policies:Half
    """
    try:
        placements = policy_by_name(policy).placements
    except ValueError as error:
        click.echo(f"axrt: {error}", err=True)
        sys.exit(Exit.BAD_INPUT)
    tried, left_out = 0, Counter[str]()
    for case in _cases(placements, max_ranks, max_microbatches, seeds):
        try:
            job = build_schedule(
                policy,
                case.ranks,
                case.microbatches,
                placement=case.placement,
                chunks=case.chunks,
            )
        except UnsoundPolicyError as error:
            _fail(case, policy, str(error))
        except ValueError as error:
            left_out[str(error)] += 1
            continue
        fault = fault_of(job, case.costs)
        if fault:
            _fail(case, policy, fault)
        tried += 1
    click.echo(f"{policy}: {tried} schedules, none stuck, and none held more than its bounds say")
    for why, number in left_out.most_common(3):
        click.echo(f"left out {number}: {why}", err=True)
    sys.exit(Exit.DONE if tried else Exit.BAD_INPUT)


def _fail(case: _Case, policy: str, fault: str) -> None:
    click.echo(f"axrt: {fault}\nwith {case.command(policy)}", err=True)
    sys.exit(_FOUND)


def _cases(
    placements: tuple[str, ...], ranks: int, microbatches: int, seeds: int
) -> Iterator[_Case]:
    for placement in placements:
        for p in range(1, ranks + 1):
            for m in range(1, microbatches + 1):
                for chunks in (2, 3) if placement in _CHUNKED else (0,):
                    for seed in range(seeds):
                        yield _Case(p, m, placement, chunks, seed)
