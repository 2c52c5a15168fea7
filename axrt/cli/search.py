"""`axrt simulate --search`: the best placement, chunks and cap for given costs, and how far it is from what no schedule can beat."""

from collections.abc import Callable
from typing import Any, NamedTuple

import click
from rich.console import Console
from rich.table import Table

from axrt.schedule import Scheduled, candidates
from axrt.scheduler.bound import least_makespan
from axrt.scheduler.simulator import Costs
from axrt.scheduler.timeline import Timeline

_CHUNKS = (0, 3, 4)  # 0 is the placement's own, which is 2 where there is a choice


class Tried(NamedTuple):
    """A schedule and what came of it.

    Args:
        of: which one.
        makespan: of all steps.
        least: what no schedule on its placement can beat.
        held: the most that a rank holds, in microbatches of all its layers.
        utilisation: the busiest rank's work over the makespan.
    """

    of: Scheduled
    makespan: float
    least: float
    held: float
    utilisation: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        of = self.of
        return {
            "policy": of.name,
            "placement": of.job.placement.name,
            "chunks": of.job.placement.chunks,
            "in_flight": of.in_flight,
            "copies": of.job.placement.pipes,
            **{key: getattr(self, key) for key in ("makespan", "least", "held", "utilisation")},
        }


def search(
    ranks: int, microbatches: int, steps: int, most_held: float, run: Callable[[Scheduled], tuple[Costs, Timeline]]
) -> tuple[list[Tried], float]:
    """All that fit, the fastest first; and what no schedule on any of their placements can beat.

    Args:
        ranks, microbatches, steps: of the pipeline.
        most_held: microbatches of all its layers that a rank may hold; 0: any number.
        run: simulates one.
    """
    found = []
    for one in candidates(ranks, microbatches, _CHUNKS, thorough=True):
        costs, line = run(one)
        least = least_makespan(one.job.placement, costs, microbatches, steps)
        found.append(Tried(one, line.makespan, least, max(line.held) * one.job.placement.share, line.utilisation))
    fitting = [one for one in found if not most_held or one.held <= most_held + 1e-9]
    return sorted(fitting, key=lambda one: (one.makespan, one.held)), min((one.least for one in found), default=0.0)


def show(found: list[Tried], least: float, rows: int = 12) -> None:
    """The fastest, and how far from the bound."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("policy", "placement"):
        table.add_column(column, no_wrap=True)
    for column in ("in_flight", "makespan", "utilisation", "held", "copies of the weights", "above the bound"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in found[:rows]:
        of = one.of
        counts = (str(of.in_flight or ""), f"{one.makespan:.2f}", f"{one.utilisation:.3f}", f"{one.held:g}", str(of.job.placement.pipes))
        table.add_row(
            of.name, f"{of.job.placement.name} x{of.job.placement.chunks}", *counts, f"{100 * (one.makespan / one.least - 1):.1f} %"
        )
    Console(width=max(112, Console().width), highlight=False).print(table)
    best = found[0]
    click.echo(
        f"best of {len(found)}: {best.of.name}, {best.makespan:.2f}. No schedule on its placement can take less than {best.least:.2f}, "
        f"none on any that was tried less than {least:.2f}, with whatever memory and if nothing varies.\n"
        "held: the most microbatches that a rank holds, in those of all its layers; above the bound: of the row's own placement"
    )
